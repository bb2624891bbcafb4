//go:debug multipathtcp=0

// The server behind all peers of the benchmark: the accept loop of Go's standard library, as in
// kube-apiserver, and a goroutine for each connection. Messages are as in ../src/bench/wire.rs.
// Listeners are plain TCP (no MPTCP), as for instances of `berth exec`.
package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"runtime"
	"sync/atomic"
)

const (
	// Bytes of a ClientHello's headers, and of a message's header: ClientHello, a flag and three
	// numbers.
	hello, header = 9, 9 + 21
	// The length of a message that lasts as long as its connection.
	endless = ^uint64(0)
	// Most bytes in one read or write, and in the first of a message.
	chunk, first = 256 << 10, 4096
	// The pattern repeats after this many bytes. Reads up to this length are compared completely,
	// and longer reads only at the beginning and the end.
	period, compared = 256, 1024
)

var (
	pattern [chunk + period]byte
	blank   = [hello]byte{0x16, 3, 1, 0, header - 5, 1, 0, 0, header - hello}
	// Received bytes of endless requests, on all connections.
	arrived    atomic.Uint64
	errGarbled = errors.New("bytes arrived that were not sent")
)

func main() {
	address := flag.String("bind-address", "", "address to listen on")
	port := flag.String("secure-port", "0", "port to listen on")
	flag.String("advertise-address", "", "not used: berth exec sets it")
	flag.Parse()
	for at := range pattern {
		pattern[at] = byte(at % period)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(*address, *port))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n%s\n", runtime.Version(), listener.Addr())
	for {
		connection, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			defer connection.Close()
			// After any other error the client has closed the connection.
			if err := serve(connection); errors.Is(err, errGarbled) {
				log.Print(err)
			}
		}()
	}
}

// serve answers requests until the connection ends.
func serve(connection net.Conn) error {
	buffer := make([]byte, first)
	for {
		received := 0
		for received < header {
			count, err := connection.Read(buffer[received:])
			if err != nil {
				return err
			}
			received += count
		}
		numbers := buffer[hello:header]
		request, answer := binary.BigEndian.Uint64(numbers[5:]), binary.BigEndian.Uint64(numbers[13:])
		if !bytes.Equal(buffer[:hello], blank[:]) || numbers[0] > 1 || request < header || answer < header {
			return errGarbled
		}
		if err := check(buffer[header:received], header); err != nil {
			return err
		}
		if err := receive(connection, buffer, uint64(received), request); err != nil {
			return err
		}
		if numbers[0] == 1 {
			binary.BigEndian.PutUint64(numbers[5:], arrived.Load())
		}
		if err := send(connection, buffer, answer); err != nil {
			return err
		}
	}
}

// receive reads the rest of a request, after the header in the buffer.
func receive(connection net.Conn, buffer []byte, received, request uint64) error {
	rest := buffer[header:]
	if request == endless {
		arrived.Add(received)
		rest = make([]byte, chunk)
	}
	for received < request {
		count, err := connection.Read(rest)
		if err != nil {
			return err
		}
		if err := check(rest[:count], received); err != nil {
			return err
		}
		received += uint64(count)
		if request == endless {
			arrived.Add(uint64(count))
		}
	}
	if received > request {
		return errGarbled
	}
	return nil
}

// check compares a body's bytes from an offset of the message on.
func check(body []byte, offset uint64) error {
	expected := pattern[offset%period:][:len(body)]
	same := bytes.Equal
	if len(body) > compared {
		same = func(a, b []byte) bool { return bytes.Equal(a[:period], b[:period]) && a[len(a)-1] == b[len(b)-1] }
	}
	if !same(body, expected) {
		return errGarbled
	}
	return nil
}

// send writes an answer that begins with the header in the buffer.
func send(connection net.Conn, buffer []byte, answer uint64) error {
	sent := min(answer, uint64(len(buffer)))
	copy(buffer[header:sent], pattern[header:])
	if _, err := connection.Write(buffer[:sent]); err != nil {
		return err
	}
	for sent < answer {
		count := min(answer-sent, chunk)
		if _, err := connection.Write(pattern[sent%period:][:count]); err != nil {
			return err
		}
		sent += count
	}
	return nil
}
