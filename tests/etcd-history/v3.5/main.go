// etcd's own main package lives in its root module, which cannot be required: its go.mod
// replaces its parts by folders. The server module exports the same entry point.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() {
	etcdmain.Main(os.Args)
}
