package main

import (
	"strings"
	"testing"
)

// sound returns a small history without a violation: writes of unknown outcome with and without an
// effect, and swaps that succeeded and failed.
func sound() *history {
	return &history{first: 10, operations: []operation{
		{Client: 0, Kind: put, Key: "k/0", Value: "a", Call: 1, Return: 2, Revision: 11},
		{Client: 1, Kind: get, Key: "k/0", Call: 3, Return: 4, Revision: 11, Found: "a", Modified: 11},
		{Client: 2, Kind: put, Key: "k/0", Value: "b", Call: 5, Return: 6, Error: "timed out"},
		{Client: 3, Kind: put, Key: "k/0", Value: "never", Call: 5, Return: 6, Error: "timed out"},
		{Client: 1, Kind: get, Key: "k/0", Call: 7, Return: 8, Revision: 12, Found: "b", Modified: 12},
		{Client: 0, Kind: swap, Key: "k/0", Value: "c", Expects: 11, Call: 9, Return: 10, Revision: 12, Found: "b", Modified: 12},
		{Client: 0, Kind: swap, Key: "k/0", Value: "d", Expects: 12, Call: 11, Return: 12, Revision: 13, Succeeded: true},
		{Client: 1, Kind: get, Key: "k/0", Call: 13, Return: 14, Revision: 13, Found: "d", Modified: 13},
	}, watches: []*watched{{name: "watch", events: []event{{11, "k/0", "a", 3}, {12, "k/0", "b", 8}, {13, "k/0", "d", 13}}}}}
}

func TestASoundHistoryIsFoundSound(t *testing.T) {
	if found := sound().judge(t.TempDir()); len(found.violations) > 0 || found.writes != 2 || found.unknown != 2 {
		t.Errorf("%+v", found)
	}
}

func TestEachKindOfFaultIsFound(t *testing.T) {
	for words, spoil := range map[string]func(*history){
		"porcupine: ":                 func(h *history) { h.operations[7].Found, h.operations[7].Modified = "b", 12 },
		"not linearizable":            func(h *history) { h.operations[6].Expects = 11 },
		"revision: get":               func(h *history) { h.operations[7].Revision = 12 },
		"revision: 11 was given":      func(h *history) { h.operations[6].Revision = 11 },
		"not delivered":               func(h *history) { h.watches[0].events = h.watches[0].events[:2] },
		"watch: revision 12":          func(h *history) { h.watches = append(h.watches, &watched{events: []event{{12, "k/0", "x", 9}}}) },
		"watch: watch got revision 3": func(h *history) { h.watches[0].broken = []string{"watch got revision 3"} },
	} {
		spoiled := sound()
		spoil(spoiled)
		if found := spoiled.judge(t.TempDir()).violations; !strings.Contains(strings.Join(found, "\n"), words) {
			t.Errorf("%q was not found: %q", words, found)
		}
	}
}

func TestAWriteOfTheLedgerThatIsNotThereIsFound(t *testing.T) {
	all := []operation{
		{Kind: put, Key: ledger + "0", Value: "a", Revision: 11},
		{Kind: put, Key: ledger + "1", Value: "b", Revision: 12},
		{Kind: put, Key: ledger + "2", Value: "c", Error: "timed out"},
	}
	if gone, acknowledged := missing(all, map[string]cell{ledger + "0": {"a", 11}}); acknowledged != 2 || len(gone) != 1 || gone[0].Value != "b" {
		t.Errorf("%d acknowledged, gone: %v", acknowledged, gone)
	}
}
