package main

import (
	"net"
	"net/http"
	"os"
	"strings"
)

// standIn serves as a kube-apiserver that is always ready, so that a bridge has one to copy. Only
// its flags about etcd matter.
func standIn() {
	flags := map[string]string{"--bind-address": "0.0.0.0", "--secure-port": "6443"}
	arguments := os.Args[1:]
	for at, argument := range arguments {
		if name, value, found := strings.Cut(argument, "="); found {
			flags[name] = value
		} else if at+1 < len(arguments) {
			flags[argument] = arguments[at+1]
		}
	}
	ok := http.HandlerFunc(func(answer http.ResponseWriter, _ *http.Request) { _, _ = answer.Write([]byte("ok")) })
	address := net.JoinHostPort(flags["--bind-address"], flags["--secure-port"])
	check(http.ListenAndServeTLS(address, flags["--tls-cert-file"], flags["--tls-private-key-file"], ok))
}
