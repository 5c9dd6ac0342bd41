package uplink

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is the kernel's struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [4]byte
}

// A batch holds the headers of up to batchSize messages of one piece each.
type batch struct {
	hdrs [batchSize]mmsghdr
	iovs [batchSize]unix.Iovec
}

// batchSize is the number of datagrams moved by one system call.
const batchSize = 32

func (b *batch) set(i int, buf []byte) {
	b.iovs[i].Base = unsafe.SliceData(buf)
	b.iovs[i].SetLen(len(buf))
	b.hdrs[i] = mmsghdr{hdr: unix.Msghdr{Iov: &b.iovs[i], Iovlen: 1}}
}

// length is how many bytes message i had, after recv; truncated tells that it had more.
func (b *batch) length(i int) (n int, truncated bool) {
	return int(b.hdrs[i].len), b.hdrs[i].hdr.Flags&unix.MSG_TRUNC != 0
}

func (b *batch) send(fd, n int) (int, error) { return b.call(unix.SYS_SENDMMSG, fd, n) }
func (b *batch) recv(fd, n int) (int, error) { return b.call(unix.SYS_RECVMMSG, fd, n) }

func (b *batch) call(nr uintptr, fd, n int) (int, error) {
	for {
		done, _, e := unix.Syscall6(nr, uintptr(fd), uintptr(unsafe.Pointer(&b.hdrs[0])), uintptr(n), unix.MSG_DONTWAIT, 0, 0)
		switch e {
		case 0:
			return int(done), nil
		case unix.EINTR:
			continue
		}
		return 0, e
	}
}
