package routes

import (
	"bufio"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
)

// serveHTTP is a web server of the world.
func serveHTTP(t *testing.T, addr string) {
	t.Helper()
	var l net.Listener
	must(theWorld.place.do(func() (err error) { l, err = net.Listen("tcp", addr); return err }))
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
	mux.HandleFunc("/large", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 64<<20)) })
	mux.HandleFunc("/upload", func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n)
	})
	s := &http.Server{Handler: mux}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
}

// startProxies are a SOCKS5 and an HTTP proxy on the host's loopback that want a password.
func startProxies(t *testing.T) (socks, web string) {
	t.Helper()
	listen := func(handle func(net.Conn)) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(err)
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				theWorld.note("proxy")
				go func() {
					defer c.Close()
					handle(c)
				}()
			}
		}()
		return l.Addr().String()
	}
	return listen(socksServer), listen(connectServer)
}

func relay(c io.ReadWriter, to string) {
	s, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer s.Close()
	go func() {
		_, _ = io.Copy(s, c)
		_ = s.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(c, s)
}

func socksServer(c net.Conn) {
	b := make([]byte, 300)
	read := func(n int) []byte { _, _ = io.ReadFull(c, b[:n]); return b[:n] }
	read(int(read(2)[1]))
	_, _ = c.Write([]byte{5, 2}) // wants a user name and password
	user := string(read(int(read(2)[1])))
	if pass := string(read(int(read(1)[0]))); user != "user" || pass != "secret" {
		return
	}
	_, _ = c.Write([]byte{1, 0})
	var addr netip.Addr
	if read(4)[3] == 4 {
		addr = netip.AddrFrom16([16]byte(read(16)))
	} else {
		addr = netip.AddrFrom4([4]byte(read(4)))
	}
	to := netip.AddrPortFrom(addr, binary.BigEndian.Uint16(read(2)))
	_, _ = c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	relay(c, to.String())
}

func connectServer(c net.Conn) {
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil || r.Method != http.MethodConnect || r.Header.Get("Proxy-Authorization") != "Basic "+base64.StdEncoding.EncodeToString([]byte("user:secret")) {
		return
	}
	_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
	relay(c, r.Host)
}
