//! Runs a program of type sk_lookup as the kernel would, for where it takes none: the instructions that programs of berth's have, and no
//! others. What the verifier or the kernel would not allow is a panic. The kernel's part, to give a connection to a listener, always goes
//! well here.

use super::super::*;
use crate::bpf::parts::State;
use crate::bpf::sys::test_run::Lookup;
use crate::clock;
use std::sync::atomic::Ordering::Relaxed;

// Where things are, by the upper 32 bits of an address.
const CONTEXT: u64 = 1;
const STACK: u64 = 2;
const STATE: u64 = 3;
const LISTENERS: u64 = 4;
const SOCKET: u64 = 5;

const STACK_BYTES: usize = 64;

// Instructions.
const LOAD: u8 = LDX | MEM;
const LOAD_MAP: u8 = LD | IMM | Size::U64 as u8;
const COPY: u8 = ALU64 | MOV | X;
const SET: u8 = ALU64 | MOV;
const PLUS: u8 = ALU64 | ADD;
const MASK: u8 = ALU | AND;
const LOAD_U64: u8 = LOAD | Size::U64 as u8;
const STORE: u8 = STX | MEM;
const ATOMIC_ADD: u8 = STX | ATOMIC | Size::U64 as u8;
const CALLS: u8 = JMP | CALL;
const EXITS: u8 = JMP | EXIT;
const JUMP: u8 = JMP | JA;
const IF_ZERO: u8 = JMP | JEQ;
const IF_GREATER: u8 = JMP | JGT | X;
const IF_DIFFERS: u8 = JMP | JNE | X;
const IF_EQUAL: u8 = JMP32 | JEQ;
const IF_NOT_EQUAL: u8 = JMP32 | JNE;

/// What a register holds that nothing set, or a call overwrote.
const NOTHING: u64 = 0xdead_dead_dead_dead;

struct Machine<'a> {
    registers: [u64; 11],
    stack: [u8; STACK_BYTES],
    lookup: &'a Lookup,
    state: &'a State,
    /// The cookies of the listeners in the map.
    listeners: [Option<u64>; 2],
    /// Sockets that were looked up and not released.
    references: usize,
    chosen: Option<u64>,
}

/// The cookie of the listener that it chooses.
pub(in crate::bpf) fn run(
    program: &[Instruction],
    lookup: &Lookup,
    state: &State,
    listeners: [Option<u64>; 2],
) -> Option<u64> {
    let mut registers = [NOTHING; 11];
    (registers[1], registers[10]) = (CONTEXT << 32, (STACK << 32) + STACK_BYTES as u64);
    let mut machine =
        Machine { registers, stack: [0; STACK_BYTES], lookup, state, listeners, references: 0, chosen: None };
    let mut at = 0;
    while let Some(next) = machine.step(program, at) {
        at = next;
    }
    assert_eq!((machine.registers[0], machine.references), (1, 0), "it never drops, and keeps no socket");
    machine.chosen
}

impl Machine<'_> {
    /// Where it goes on; none: it is over.
    fn step(&mut self, program: &[Instruction], at: usize) -> Option<usize> {
        let Instruction { code, registers, offset, immediate } = program[at];
        let (low, high) = (usize::from(registers & 0xf), usize::from(registers >> 4));
        let (to, from) = if cfg!(target_endian = "little") { (low, high) } else { (high, low) };
        let value = i64::from(immediate).cast_unsigned();
        let (left, right) = (self.registers[to], self.registers[from]);
        let there = |from: u64| from.wrapping_add_signed(offset.into());
        let jumps = match code {
            COPY => self.set(to, right),
            SET => self.set(to, value),
            PLUS => self.set(to, left.wrapping_add(value)),
            MASK => self.set(to, left & u64::from(immediate.cast_unsigned())),
            LOAD | LOAD_U64 => self.set(to, self.load(there(right), if code == LOAD { 4 } else { 8 })),
            STORE => {
                let place = self.on_stack(there(left), 4);
                self.stack[place].copy_from_slice(&u32::try_from(right).unwrap().to_ne_bytes());
                false
            }
            ATOMIC_ADD => {
                assert_eq!(immediate, i32::from(ADD));
                self.counter(there(left)).fetch_add(right, Relaxed);
                false
            }
            LOAD_MAP => {
                let map = from == MapAs::Map as usize;
                self.set(to, if map { LISTENERS << 32 } else { STATE << 32 });
                return Some(at + 2);
            }
            CALLS => self.call(immediate),
            EXITS => return None,
            JUMP => true,
            IF_ZERO => left == value,
            IF_GREATER => left > right,
            IF_DIFFERS => left != right,
            IF_EQUAL => left as u32 == immediate.cast_unsigned(),
            IF_NOT_EQUAL => left as u32 != immediate.cast_unsigned(),
            _ => panic!("{:?} is not known", program[at]),
        };
        let next = at + 1;
        Some(if jumps { next.checked_add_signed(offset.into()).unwrap() } else { next })
    }

    /// It goes on with the next instruction.
    fn set(&mut self, register: usize, value: u64) -> bool {
        self.registers[register] = value;
        false
    }

    fn on_stack(&self, address: u64, length: usize) -> std::ops::Range<usize> {
        assert_eq!(address >> 32, STACK);
        let begin = address as u32 as usize;
        begin..begin + length
    }

    fn load(&self, address: u64, length: usize) -> u64 {
        let bytes = match address >> 32 {
            CONTEXT => {
                let begin = address as u32 as usize;
                self.lookup.bytes()[begin..begin + length].to_vec()
            }
            STATE => self.counter(address).load(Relaxed).to_ne_bytes().to_vec(),
            _ => self.stack[self.on_stack(address, length)].to_vec(),
        };
        match bytes[..] {
            [a, b, c, d] if length == 4 => u32::from_ne_bytes([a, b, c, d]).into(),
            _ => u64::from_ne_bytes(bytes.try_into().unwrap()),
        }
    }

    fn counter(&self, address: u64) -> &std::sync::atomic::AtomicU64 {
        assert_eq!((address >> 32, address % 8), (STATE, 0));
        self.state.all()[address as u32 as usize / 8]
    }

    fn call(&mut self, helper: i32) -> bool {
        let [_, one, two, three, ..] = self.registers;
        let socket = |address: u64| {
            assert_eq!(address >> 32, SOCKET);
            address as u32 as usize
        };
        let result = if helper == Helper::MonotonicTime as i32 {
            u64::try_from(clock::monotonic().unwrap().as_nanos()).unwrap()
        } else if helper == Helper::MapLookup as i32 {
            assert_eq!(one, LISTENERS << 32);
            let key = self.load(two, 4);
            match self.listeners[key as usize] {
                Some(_) => {
                    self.references += 1;
                    SOCKET << 32 | key
                }
                None => 0,
            }
        } else if helper == Helper::SocketAssign as i32 {
            assert!(one == CONTEXT << 32 && three <= 1);
            self.chosen = self.listeners[socket(two)];
            0
        } else if helper == Helper::SocketRelease as i32 {
            socket(one);
            self.references -= 1;
            0
        } else {
            panic!("helper {helper} is not known");
        };
        self.registers[..6].fill(NOTHING);
        self.set(0, result)
    }
}
