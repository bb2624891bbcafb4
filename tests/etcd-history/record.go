package main

import (
	"context"
	"fmt"
	"math"
	"math/rand"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

const (
	put   = "put"
	get   = "get"
	swap  = "compare-and-swap"
	keys  = 8
	reads = "k/"
	// Prefix of keys that are written once and never again, so that each acknowledged key must be
	// there in the end.
	ledger = "ledger/"
	// Time after which the outcome of a request is unknown.
	patience = 4 * time.Second
)

// A request of a client. Times are monotonic, in nanoseconds since the start of this program.
type operation struct {
	Client  int    `json:"client"`
	Kind    string `json:"kind"`
	Key     string `json:"key"`
	Value   string `json:"value,omitempty"`
	Expects int64  `json:"expects,omitempty"`
	Call    int64  `json:"call"`
	Return  int64  `json:"return"`
	Error   string `json:"error,omitempty"`
	// The answer: the store's revision, and the key's value (for a get, and for a swap that failed).
	Revision  int64  `json:"revision,omitempty"`
	Succeeded bool   `json:"succeeded,omitempty"`
	Found     string `json:"found,omitempty"`
	Modified  int64  `json:"modified,omitempty"`
}

// writes returns true if the operation changed the store.
func (o operation) writes() bool {
	return o.Error == "" && (o.Kind == put || o.Kind == swap && o.Succeeded)
}

// An event of a watch.
type event struct {
	Revision int64  `json:"revision"`
	Key      string `json:"key"`
	Value    string `json:"value"`
	At       int64  `json:"at"`
}

// The events of a watch, and the revisions that a compaction removed before their delivery.
type watched struct {
	name   string
	events []event
	gaps   [][2]int64
	broken []string
}

// A history is everything that clients saw of one data directory.
type history struct {
	lock       sync.Mutex
	operations []operation
	watches    []*watched
	first      int64
	// Time after which nothing is recorded. 0 for no limit.
	ended int64
	// Events outside of the clients, to explain a pause.
	marks []mark
}

type mark struct {
	at   int64
	what string
}

var epoch = time.Now()

func now() int64 { return int64(time.Since(epoch)) }

func (h *history) add(done operation) {
	h.lock.Lock()
	defer h.lock.Unlock()
	if h.ended == 0 || done.Return < h.ended {
		h.operations = append(h.operations, done)
	}
}

// endAt ends the history: later operations belong to another store. Watches need not get later
// events either.
func (h *history) endAt(at int64) {
	h.lock.Lock()
	defer h.lock.Unlock()
	h.ended = at
	for _, seen := range h.watches {
		next := h.first + 1
		if count := len(seen.events); count > 0 {
			next = seen.events[count-1].Revision + 1
		}
		seen.gaps = append(seen.gaps, [2]int64{next, math.MaxInt64})
	}
}

func (h *history) mark(format string, arguments ...any) {
	what := fmt.Sprintf(format, arguments...)
	note("%s", what)
	h.lock.Lock()
	h.marks = append(h.marks, mark{now(), what})
	h.lock.Unlock()
}

// acknowledged counts successful operations that were called after a time.
func (h *history) acknowledged(since int64) int {
	h.lock.Lock()
	defer h.lock.Unlock()
	count := 0
	for at := len(h.operations) - 1; at >= 0 && h.operations[at].Return >= since; at-- {
		if h.operations[at].Error == "" && h.operations[at].Call >= since {
			count++
		}
	}
	return count
}

// Clients of a history.
type clients struct {
	history *history
	seed    int64
	// Ways to etcd that the clients use.
	paths  []path
	stop   context.CancelFunc
	paused atomic.Bool
	group  sync.WaitGroup
	watch  sync.WaitGroup
	// Watches end at this revision.
	last atomic.Int64
}

// A way to etcd: a source address, and a function that returns the current address of etcd.
type path struct {
	name, from string
	to         func() string
}

// startClients starts readers, writers and watches, each in turn on one of the paths.
func startClients(h *history, files certificates, seed int64, paths ...path) *clients {
	all := &clients{history: h, seed: seed, paths: paths}
	ctx, cancel := context.WithCancel(context.Background())
	all.stop = cancel
	dial := func(number int) *grpc.ClientConn {
		way := paths[number%len(paths)]
		return connect(files.client(), way.from, way.to)
	}
	for number := range 8 {
		all.group.Go(func() { all.operate(ctx, number, func() *grpc.ClientConn { return dial(number) }) })
	}
	for number := range 2 {
		seen := &watched{name: fmt.Sprintf("watch %d (%s)", number, paths[number%len(paths)].name)}
		h.watches = append(h.watches, seen)
		all.watch.Go(func() { all.follow(seen, func() *grpc.ClientConn { return dial(number) }) })
	}
	return all
}

// operate runs a client. Two of eight clients write the ledger, and six read, write and swap a few
// keys.
func (c *clients) operate(ctx context.Context, number int, dial func() *grpc.ClientConn) {
	random := rand.New(rand.NewSource(c.seed + int64(number)))
	connection := dial()
	defer func() { connection.Close() }()
	modified := map[string]int64{}
	for count := 0; ctx.Err() == nil; count++ {
		if c.paused.Load() {
			time.Sleep(5 * time.Millisecond)
			continue
		}
		wanted := operation{Client: number, Value: fmt.Sprintf("%d-%d-%d", c.seed, number, count)}
		if number >= 6 {
			wanted.Kind, wanted.Key = put, fmt.Sprintf("%s%d/%08d", ledger, number, count)
		} else {
			wanted.Key = fmt.Sprintf("%s%d", reads, random.Intn(keys))
			switch random.Intn(10) {
			case 0, 1, 2, 3:
				wanted.Kind, wanted.Value = get, ""
			case 4, 5, 6:
				wanted.Kind = put
			default:
				wanted.Kind, wanted.Expects = swap, modified[wanted.Key]
			}
		}
		done := perform(connection, wanted)
		c.history.add(done)
		switch {
		case done.Error != "":
			// After a request without an answer, the client leaves the connection to the hanging server.
			if done.Return-done.Call >= int64(patience) {
				connection.Close()
				connection = dial()
			}
			time.Sleep(20 * time.Millisecond)
		case done.writes():
			modified[done.Key] = done.Revision
		default:
			modified[done.Key] = done.Modified
		}
		time.Sleep(time.Duration(random.Intn(30)) * time.Millisecond)
	}
}

// perform sends a request once, and records the result.
func perform(connection *grpc.ClientConn, wanted operation) operation {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client := pb.NewKVClient(connection)
	read := &pb.RangeRequest{Key: []byte(wanted.Key)}
	write := &pb.PutRequest{Key: []byte(wanted.Key), Value: []byte(wanted.Value)}
	found := func(answer *pb.RangeResponse) {
		for _, pair := range answer.GetKvs() {
			wanted.Found, wanted.Modified = string(pair.Value), pair.ModRevision
		}
	}
	wanted.Call = now()
	var err error
	switch wanted.Kind {
	case get:
		var answer *pb.RangeResponse
		if answer, err = client.Range(ctx, read); err == nil {
			wanted.Revision = answer.Header.Revision
			found(answer)
		}
	case put:
		var answer *pb.PutResponse
		if answer, err = client.Put(ctx, write); err == nil {
			wanted.Revision = answer.Header.Revision
		}
	case swap:
		var answer *pb.TxnResponse
		answer, err = client.Txn(ctx, &pb.TxnRequest{
			Compare: []*pb.Compare{{
				Key: []byte(wanted.Key), Target: pb.Compare_MOD, Result: pb.Compare_EQUAL,
				TargetUnion: &pb.Compare_ModRevision{ModRevision: wanted.Expects},
			}},
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: write}}},
			Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: read}}},
		})
		if err == nil {
			wanted.Revision, wanted.Succeeded = answer.Header.Revision, answer.Succeeded
			if !answer.Succeeded {
				found(answer.Responses[0].GetResponseRange())
			}
		}
	}
	wanted.Return = now()
	if err != nil {
		wanted.Error = err.Error()
	}
	return wanted
}

// follow runs a client that watches all keys, and resumes after its last event, as client-go does.
func (c *clients) follow(seen *watched, dial func() *grpc.ClientConn) {
	next := c.history.first + 1
	for c.last.Load() == 0 || next <= c.last.Load() {
		connection := dial()
		next = c.once(seen, connection, next)
		connection.Close()
		time.Sleep(20 * time.Millisecond)
	}
}

// once watches on one stream, and returns the next revision to ask for.
func (c *clients) once(seen *watched, connection *grpc.ClientConn, next int64) int64 {
	// After a silence, the watch is started again: a hanging server does not end its streams.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	silence := time.AfterFunc(patience, cancel)
	defer silence.Stop()
	stream, err := pb.NewWatchClient(connection).Watch(ctx)
	if err != nil {
		return next
	}
	create := &pb.WatchCreateRequest{Key: []byte{0}, RangeEnd: []byte{0}, StartRevision: next}
	if stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}}) != nil {
		return next
	}
	for c.last.Load() == 0 || next <= c.last.Load() {
		answer, err := stream.Recv()
		if err != nil {
			return next
		}
		silence.Reset(patience)
		c.history.lock.Lock()
		if c.history.ended > 0 {
			c.history.lock.Unlock()
			return math.MaxInt64
		}
		if answer.CompactRevision >= next {
			seen.gaps = append(seen.gaps, [2]int64{next, answer.CompactRevision - 1})
			next = answer.CompactRevision
		}
		for _, one := range answer.Events {
			revision := one.Kv.ModRevision
			if revision != next {
				seen.broken = append(seen.broken, fmt.Sprintf("%s got revision %d where %d comes next", seen.name, revision, next))
			}
			seen.events = append(seen.events, event{revision, string(one.Kv.Key), string(one.Kv.Value), now()})
			next = revision + 1
		}
		c.history.lock.Unlock()
		if answer.Canceled {
			return next
		}
	}
	return next
}

// pause waits until no request is in flight.
func (c *clients) pause() {
	c.paused.Store(true)
	time.Sleep(patience + 200*time.Millisecond)
}

// end stops the clients, and waits until the watches have the last revision, which is requested
// once more.
func (c *clients) end(last int64, limit time.Duration) {
	c.stop()
	c.group.Wait()
	c.last.Store(last)
	done := make(chan struct{})
	go func() { c.watch.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(limit):
		c.history.lock.Lock()
		for _, seen := range c.history.watches {
			if count := len(seen.events); count == 0 || seen.events[count-1].Revision < last {
				seen.broken = append(seen.broken, fmt.Sprintf("%s did not get to revision %d within %s", seen.name, last, limit))
			}
		}
		c.history.lock.Unlock()
	}
}
