// Package trust is the Trust Anchor: an ephemeral certificate authority of one Domain, in the coordinator's memory.
//
// The authority's key never leaves the process and ends with it. The coordinator presents a server certificate; each
// Client Session gets one client certificate, which names Domain and Session ID in a URI and is worthless from
// [Anchor.Revoke] on, whatever its validity. TLS 1.3 only, both sides authenticated, no session tickets: a resumed
// connection would not be verified again. A connection that fails here carries no frame and reaches no other code (SR-9).
//
// All methods may be called from any goroutine.
package trust

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"sync"
	"time"
)

// ServerName is the name in the coordinator's certificate. It is not resolved; the address comes from the endpoint file.
const ServerName = "escalate.lazaret.internal"

// ErrNotRegistered means that a certificate is this Domain's, but its session is not registered (any more).
var ErrNotRegistered = errors.New("session is not registered")

// Anchor is a Trust Anchor.
type Anchor struct {
	domain string
	life   time.Duration
	now    func() time.Time
	key    ed25519.PrivateKey
	cert   *x509.Certificate
	server tls.Certificate

	mu   sync.Mutex
	live map[string]*big.Int // Session ID -> serial number of its one certificate
}

// New makes the authority of a Domain. Certificates are valid for life, 0 meaning 30 days; now is the clock.
func New(domain string, life time.Duration, now func() time.Time) (*Anchor, error) {
	if life <= 0 {
		life = 30 * 24 * time.Hour
	}
	a := &Anchor{domain: domain, life: life, now: now, live: map[string]*big.Int{}}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make Trust Anchor: %w", err)
	}
	a.key = key
	tmpl, err := a.template("Lazaret Trust Anchor")
	if err != nil {
		return nil, err
	}
	tmpl.IsCA, tmpl.BasicConstraintsValid, tmpl.MaxPathLenZero = true, true, true
	tmpl.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, pub, key)
	if err != nil {
		return nil, fmt.Errorf("make Trust Anchor: %w", err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("make Trust Anchor: %w", err)
	}
	if tmpl, err = a.template("coordinator"); err != nil {
		return nil, err
	}
	tmpl.DNSNames = []string{ServerName}
	tmpl.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	a.server, err = a.sign(tmpl)
	return a, err
}

func (a *Anchor) template(name string) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make certificate: %w", err)
	}
	now := a.now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    now.Add(-time.Minute),
		NotAfter:     now.Add(a.life),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}, nil
}

func (a *Anchor) sign(tmpl *x509.Certificate) (tls.Certificate, error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make certificate: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, pub, a.key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// CA returns the authority's certificate in PEM, for the sandbox to verify the coordinator with.
func (a *Anchor) CA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

func (a *Anchor) uri(session string) *url.URL {
	return &url.URL{Scheme: "lazaret", Host: a.domain, Path: "/session/" + session}
}

// Issue makes the certificate of a session, in PEM, and registers the session. An earlier one of the same session is void.
func (a *Anchor) Issue(session string) (cert, key []byte, err error) {
	tmpl, err := a.template("session " + session)
	if err != nil {
		return nil, nil, err
	}
	tmpl.URIs = []*url.URL{a.uri(session)}
	tmpl.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	pair, err := a.sign(tmpl)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		return nil, nil, fmt.Errorf("make certificate: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.live[session] = tmpl.SerialNumber
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// Revoke ends a session's certificate. Connections that it opened are the caller's to close.
func (a *Anchor) Revoke(session string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.live, session)
}

// ServerConfig is the coordinator's side. It refuses every peer without a valid certificate of a registered session.
func (a *Anchor) ServerConfig() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		Certificates:           []tls.Certificate{a.server},
		ClientAuth:             tls.RequireAndVerifyClientCert,
		ClientCAs:              pool,
		Time:                   a.now,
		SessionTicketsDisabled: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			_, err := a.Session(cs)
			return err
		},
	}
}

// Session returns the registered session that a verified connection belongs to.
func (a *Anchor) Session(cs tls.ConnectionState) (string, error) {
	if len(cs.VerifiedChains) == 0 {
		return "", errors.New("verify peer: no verified certificate")
	}
	c := cs.VerifiedChains[0][0]
	if len(c.URIs) != 1 {
		return "", errors.New("verify peer: certificate names no session")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, serial := range a.live {
		if serial.Cmp(c.SerialNumber) == 0 && *a.uri(id) == *c.URIs[0] {
			return id, nil
		}
	}
	return "", fmt.Errorf("verify peer %q: %w", c.URIs[0], ErrNotRegistered)
}

// ClientConfig is the Escalation Client's side, from PEM texts.
func ClientConfig(ca, cert, key []byte) (*tls.Config, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("read Trust Anchor: no certificate in it")
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("read session certificate: %w", err)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		RootCAs:      pool,
		ServerName:   ServerName,
		Certificates: []tls.Certificate{pair},
	}, nil
}
