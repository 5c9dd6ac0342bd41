package uplink

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"golang.org/x/net/proxy"
)

// dialFunc connects to a destination that the gate has passed.
type dialFunc func(ctx context.Context, dst netip.AddrPort) (net.Conn, error)

// dialer gives the way of all TCP connections: the host's routes, or a proxy.
func dialer(proxyURL string) (dialFunc, error) {
	if proxyURL == "" {
		return dialHost, nil
	}
	u, err := url.Parse(proxyURL)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	server, err := netip.ParseAddrPort(u.Host)
	if err != nil {
		return nil, fmt.Errorf("proxy %q: its host must be an address with a port: %w", u.Redacted(), err)
	}
	switch u.Scheme {
	case "socks5":
		return viaSOCKS(server, u.User)
	case "http":
		return viaConnect(server, u.User), nil
	}
	return nil, fmt.Errorf("proxy %q: the scheme is neither socks5 nor http", u.Redacted())
}

func viaSOCKS(server netip.AddrPort, user *url.Userinfo) (dialFunc, error) {
	var auth *proxy.Auth
	if user != nil {
		password, _ := user.Password()
		auth = &proxy.Auth{User: user.Username(), Password: password}
	}
	d, err := proxy.SOCKS5("tcp", server.String(), auth, nil)
	if err != nil {
		return nil, fmt.Errorf("proxy: %w", err)
	}
	socks, ok := d.(interface {
		DialWithConn(ctx context.Context, c net.Conn, network, address string) (net.Addr, error)
	})
	if !ok {
		return nil, errors.New("proxy: this build cannot use SOCKS")
	}
	return func(ctx context.Context, dst netip.AddrPort) (net.Conn, error) {
		c, err := dialHost(ctx, server)
		if err != nil {
			return nil, err
		}
		if _, err := socks.DialWithConn(ctx, c, "tcp", dst.String()); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	}, nil
}

func viaConnect(server netip.AddrPort, user *url.Userinfo) dialFunc {
	return func(ctx context.Context, dst netip.AddrPort) (net.Conn, error) {
		c, err := dialHost(ctx, server)
		if err != nil {
			return nil, err
		}
		if deadline, ok := ctx.Deadline(); ok {
			_ = c.SetDeadline(deadline)
		}
		req := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: dst.String()}, Host: dst.String(), Header: http.Header{}}
		if user != nil {
			password, _ := user.Password()
			cred := base64.StdEncoding.EncodeToString([]byte(user.Username() + ":" + password))
			req.Header.Set("Proxy-Authorization", "Basic "+cred)
		}
		err = req.Write(c)
		var resp *http.Response
		if err == nil {
			// One byte at a time: what follows the answer belongs to the agent.
			resp, err = http.ReadResponse(bufio.NewReaderSize(oneByte{c}, 16), req)
		}
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("proxy: %s", resp.Status)
		}
		if err != nil {
			c.Close()
			return nil, err
		}
		_ = c.SetDeadline(time.Time{})
		return c, nil
	}
}

type oneByte struct{ c net.Conn }

func (r oneByte) Read(b []byte) (int, error) { return r.c.Read(b[:min(len(b), 1)]) }
