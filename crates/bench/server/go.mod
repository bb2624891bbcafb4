// The server behind all peers of the benchmark, built by scripts/bench.sh.
module berth.test/bench-server

go 1.26.0
