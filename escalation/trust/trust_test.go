package trust

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/url"
	"testing"
	"time"
)

func anchor(t *testing.T, domain string, now func() time.Time) *Anchor {
	t.Helper()
	a, err := New(domain, time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func clientOf(t *testing.T, a *Anchor, session string) *tls.Config {
	t.Helper()
	cert, key, err := a.Issue(session)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ClientConfig(a.CA(), cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// try connects over loopback; it returns the session that the server saw, or what stopped it, and the client's error.
func try(t *testing.T, server, client *tls.Config, who func(tls.ConnectionState) (string, error)) (string, error, error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	clientErr := make(chan error, 1)
	go func() {
		c, err := tls.Dial("tcp", ln.Addr().String(), client)
		if err == nil {
			_, err = c.Read(make([]byte, 1)) // a refusal of our certificate arrives after the handshake
			c.Close()
		}
		clientErr <- err
	}()
	raw, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s := tls.Server(raw, server)
	err = s.Handshake()
	var id string
	if err == nil {
		id, err = who(s.ConnectionState())
		_, _ = s.Write([]byte{1})
	}
	s.Close()
	return id, err, <-clientErr
}

func TestSR9Certificates(t *testing.T) {
	now := time.Now()
	clock := func() time.Time { return now }
	a, other := anchor(t, "d1", clock), anchor(t, "d1", clock)
	good := clientOf(t, a, "s1")
	clientOf(t, a, "s2")

	if id, err, cerr := try(t, a.ServerConfig(), good, a.Session); id != "s1" || err != nil || cerr != nil {
		t.Fatalf("a good certificate: %q, %v, %v", id, err, cerr)
	}

	selfSigned := func(uri string) *tls.Config {
		pub, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		u, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
			URIs: []*url.URL{u}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, IsCA: true, BasicConstraintsValid: true}
		der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, pub, key)
		if err != nil {
			t.Fatal(err)
		}
		c := good.Clone()
		c.Certificates = []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}
		return c
	}
	// A session's key signs a certificate for another session: it is no authority.
	chained := func() *tls.Config {
		leaf := good.Certificates[0]
		parent, err := x509.ParseCertificate(leaf.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		pub, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		tmpl := &x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour),
			URIs: []*url.URL{a.uri("s2")}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, pub, leaf.PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		c := good.Clone()
		c.Certificates = []tls.Certificate{{Certificate: [][]byte{der, leaf.Certificate[0]}, PrivateKey: key}}
		return c
	}
	foreign := clientOf(t, other, "s1") // same Domain ID, another coordinator's life
	foreign.RootCAs = good.RootCAs
	none := good.Clone()
	none.Certificates = nil
	serverCert := good.Clone() // the coordinator's own certificate, were it stolen, is no session
	serverCert.Certificates = []tls.Certificate{a.server}
	old := good.Clone()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12

	for name, c := range map[string]*tls.Config{
		"forged":          selfSigned("lazaret://d1/session/s1"),
		"forged by peer":  chained(),
		"other Domain's":  foreign,
		"none":            none,
		"coordinator's":   serverCert,
		"TLS 1.2 and all": old,
	} {
		if id, err, _ := try(t, a.ServerConfig(), c, a.Session); err == nil {
			t.Errorf("%s certificate was taken for %q", name, id)
		}
	}

	replaced := clientOf(t, a, "s1") // a newer certificate voids the older one
	if id, err, _ := try(t, a.ServerConfig(), good, a.Session); err == nil {
		t.Errorf("replaced certificate was taken for %q", id)
	}
	a.Revoke("s1")
	if id, err, _ := try(t, a.ServerConfig(), replaced, a.Session); err == nil {
		t.Errorf("revoked certificate was taken for %q", id)
	}
	third := clientOf(t, a, "s3")
	now = now.Add(2 * time.Hour)
	if id, err, _ := try(t, a.ServerConfig(), third, a.Session); err == nil {
		t.Errorf("expired certificate was taken for %q", id)
	}
}

// The client refuses a coordinator that is not its Domain's, and a session that poses as one.
func TestSR9ServerIsVerified(t *testing.T) {
	a, other := anchor(t, "d1", time.Now), anchor(t, "d2", time.Now)
	c := clientOf(t, a, "s1")
	if _, _, err := try(t, other.ServerConfig(), c, other.Session); err == nil {
		t.Error("the client took another Domain's coordinator")
	}
	fake := a.ServerConfig()
	fake.Certificates = c.Certificates
	if _, _, err := try(t, fake, c, a.Session); err == nil {
		t.Error("the client took a session for the coordinator")
	}
}
