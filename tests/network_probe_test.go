package tests

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// probeName is the name under which this test binary is a program of the agent.
const probeName = "netprobe"

// netProbe tries every target at once and prints a line "TARGET = RESULT" for each.
//
//	tcp:ADDR:PORT, udp:ADDR:PORT   "ok" if the echo service answers
//	name:HOST                      the addresses of a name, by the sandbox's resolver
//	ask-udp:HOST, ask-tcp:HOST     the resolver's code, asked over UDP or TCP
//	stream:ADDR:PORT               talks until that fails, at most a minute, and how it failed
//	hammer:ADDR:PORT               connects again and again for as long as the file "hammer" is there; how often it worked
func netProbe(targets []string) int {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for _, t := range targets {
		wg.Go(func() {
			kind, arg, _ := strings.Cut(t, ":")
			result := probes[kind](arg)
			mu.Lock()
			defer mu.Unlock()
			fmt.Printf("%s = %s\n", t, result)
		})
	}
	wg.Wait()
	return 0
}

var probes = map[string]func(string) string{
	"tcp":     func(a string) string { return talk("tcp", a) },
	"udp":     func(a string) string { return talk("udp", a) },
	"name":    lookUp,
	"ask-udp": func(a string) string { return askDNS("udp", a) },
	"ask-tcp": func(a string) string { return askDNS("tcp", a) },
	"stream":  stream,
	"hammer":  hammer,
}

func talk(network, addr string) string {
	c, err := net.DialTimeout(network, addr, 3*time.Second)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * time.Second))
	return exchange(c)
}

func exchange(c net.Conn) string {
	if _, err := c.Write([]byte("probe")); err != nil {
		return err.Error()
	}
	if _, err := c.Read(make([]byte, 5)); err != nil {
		return err.Error()
	}
	return "ok"
}

func lookUp(host string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return err.Error()
	}
	return strings.Join(addrs, " ")
}

func askDNS(network, host string) string {
	a, _, err := (&dns.Client{Net: network, Timeout: 3 * time.Second}).Exchange(new(dns.Msg).SetQuestion(host+".", dns.TypeA), "198.18.0.1:53")
	if err != nil {
		return err.Error()
	}
	return dns.RcodeToString[a.Rcode]
}

func stream(addr string) string {
	c, err := net.DialTimeout("tcp", addr, 3*time.Second)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	_ = os.WriteFile("streaming", nil, 0o644)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if r := exchange(c); r != "ok" {
			_ = os.WriteFile("cut", nil, 0o644)
			time.Sleep(2 * time.Second) // so that the session is still there to be told
			return r
		}
	}
	return "never cut"
}

func hammer(addr string) string {
	worked, tried := 0, 0
	for {
		if _, err := os.Stat("hammer"); err != nil {
			return fmt.Sprintf("%d of %d", worked, tried)
		}
		tried++
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			worked++
			c.Close()
		}
		_ = os.WriteFile("hammering", nil, 0o644)
		time.Sleep(2 * time.Millisecond)
	}
}
