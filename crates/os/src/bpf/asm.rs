//! An assembler for those instructions of eBPF (RFC 9669) that berth's programs have.

use std::io;

/// A register. A call takes its arguments in R1 to R5, which it overwrites, and returns in R0; R6 to R9 outlive it. R10
/// is where the stack ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reg {
    R0 = 0,
    R1 = 1,
    R2 = 2,
    R3 = 3,
    R4 = 4,
    R5 = 5,
    R6 = 6,
    R7 = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
}

/// How much is loaded or stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    U32 = 0x00,
    U64 = 0x18,
}

/// When a jump is taken. The first three compare the lower 32 bits, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum If {
    Equal(Reg, i32),
    NotEqual(Reg, i32),
    Zero(Reg),
    /// The first register, unsigned, is greater than the second.
    Greater(Reg, Reg),
    Differs(Reg, Reg),
}

/// What the kernel offers to programs, by the numbers of linux/bpf.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Helper {
    MapLookup = 1,
    MapUpdate = 2,
    MonotonicTime = 5,
    CurrentName = 16,
    SocketLookup = 84,
    SocketRelease = 86,
    NamespaceCookie = 122,
    SocketAssign = 124,
}

/// What a map's descriptor in a program stands for: the map, or where the value of its only entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapAs {
    Map = 1,
    Value = 2,
}

/// `struct bpf_insn` of linux/bpf.h.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) code: u8,
    registers: u8,
    pub(super) offset: i16,
    pub(super) immediate: i32,
}

/// A place to jump to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label(usize);

// Classes, sources and operations, by the names of RFC 9669.
const LD: u8 = 0x00;
const LDX: u8 = 0x01;
const STX: u8 = 0x03;
const ALU: u8 = 0x04;
const JMP: u8 = 0x05;
const JMP32: u8 = 0x06;
const ALU64: u8 = 0x07;
const X: u8 = 0x08;
const IMM: u8 = 0x00;
const MEM: u8 = 0x60;
const ATOMIC: u8 = 0xc0;
const ADD: u8 = 0x00;
const AND: u8 = 0x50;
const MOV: u8 = 0xb0;
const JA: u8 = 0x00;
const JEQ: u8 = 0x10;
const JGT: u8 = 0x20;
const JNE: u8 = 0x50;
const CALL: u8 = 0x80;
const EXIT: u8 = 0x90;
const END: u8 = 0xd0;

#[derive(Debug, Default)]
pub(super) struct Assembler {
    instructions: Vec<Instruction>,
    /// Where each label is, once it is placed.
    labels: Vec<Option<usize>>,
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    fn emit(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        let registers = if cfg!(target_endian = "little") { from << 4 | to } else { to << 4 | from };
        self.instructions.push(Instruction { code, registers, offset, immediate });
    }

    pub(super) fn copy(&mut self, to: Reg, from: Reg) {
        self.emit(ALU64 | MOV | X, to as u8, from as u8, 0, 0);
    }

    pub(super) fn set(&mut self, to: Reg, value: i32) {
        self.emit(ALU64 | MOV, to as u8, 0, 0, value);
    }

    pub(super) fn add(&mut self, to: Reg, value: i32) {
        self.emit(ALU64 | ADD, to as u8, 0, 0, value);
    }

    /// Keeps the bits of the mask, of the lower 32.
    pub(super) fn mask(&mut self, to: Reg, mask: i32) {
        self.emit(ALU | AND, to as u8, 0, 0, mask);
    }

    /// Of 16 bits: from the order of this host to that of the network.
    pub(super) fn network_order(&mut self, of: Reg) {
        self.emit(ALU | END | X, of as u8, 0, 0, 16);
    }

    pub(super) fn load(&mut self, size: Size, to: Reg, from: Reg, offset: i16) {
        self.emit(LDX | MEM | size as u8, to as u8, from as u8, offset, 0);
    }

    pub(super) fn store(&mut self, size: Size, to: Reg, offset: i16, from: Reg) {
        self.emit(STX | MEM | size as u8, to as u8, from as u8, offset, 0);
    }

    /// Adds to 64 bits of memory that others write too.
    pub(super) fn atomic_add(&mut self, to: Reg, offset: i16, from: Reg) {
        self.emit(STX | ATOMIC | Size::U64 as u8, to as u8, from as u8, offset, i32::from(ADD));
    }

    /// Loads a map by its descriptor, which must be open when the program is loaded. Takes the place of two instructions.
    pub(super) fn load_map(&mut self, to: Reg, map: i32, what: MapAs) {
        self.emit(LD | IMM | Size::U64 as u8, to as u8, what as u8, 0, map);
        self.instructions.push(Instruction::default());
    }

    pub(super) fn call(&mut self, helper: Helper) {
        self.emit(JMP | CALL, 0, 0, 0, helper as i32);
    }

    pub(super) fn exit(&mut self) {
        self.emit(JMP | EXIT, 0, 0, 0, 0);
    }

    pub(super) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// The label is where the next instruction will be.
    pub(super) fn place(&mut self, label: Label) {
        self.labels[label.0] = Some(self.instructions.len());
    }

    pub(super) fn jump(&mut self, label: Label) {
        self.jumps.push((self.instructions.len(), label));
        self.emit(JMP | JA, 0, 0, 0, 0);
    }

    pub(super) fn jump_if(&mut self, condition: If, label: Label) {
        self.jumps.push((self.instructions.len(), label));
        match condition {
            If::Equal(reg, value) => self.emit(JMP32 | JEQ, reg as u8, 0, 0, value),
            If::NotEqual(reg, value) => self.emit(JMP32 | JNE, reg as u8, 0, 0, value),
            If::Zero(reg) => self.emit(JMP | JEQ, reg as u8, 0, 0, 0),
            If::Greater(reg, than) => self.emit(JMP | JGT | X, reg as u8, than as u8, 0, 0),
            If::Differs(reg, from) => self.emit(JMP | JNE | X, reg as u8, from as u8, 0, 0),
        }
    }

    /// The program.
    ///
    /// # Errors
    /// A label that is nowhere, or further than a jump reaches (32,767 instructions).
    pub(super) fn finish(mut self) -> io::Result<Vec<Instruction>> {
        let wrong = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        for (at, label) in self.jumps {
            let target = self.labels[label.0].ok_or_else(|| wrong("a jump to a label that was not placed"))?;
            let offset = i16::try_from(target as i64 - at as i64 - 1);
            self.instructions[at].offset =
                offset.map_err(|_| wrong("a jump of more than 32,767 instructions: too many addresses"))?;
        }
        Ok(self.instructions)
    }
}

#[cfg(test)]
mod tests {
    use super::Reg::*;
    use super::*;

    /// One instruction, as its eight bytes.
    fn bytes(instruction: Instruction) -> [u8; 8] {
        let Instruction { code, registers, offset, immediate } = instruction;
        let ([o0, o1], [i0, i1, i2, i3]) = (offset.to_ne_bytes(), immediate.to_ne_bytes());
        [code, registers, o0, o1, i0, i1, i2, i3]
    }

    /// What `clang -target bpf` makes of the same (llvm-objdump shows it).
    #[test]
    #[cfg(target_endian = "little")]
    fn instructions_are_encoded_as_others_do() {
        let mut asm = Assembler::default();
        let end = asm.label();
        asm.copy(R6, R1);
        asm.set(R0, -2);
        asm.add(R2, -4);
        asm.mask(R2, 0xff);
        asm.network_order(R2);
        asm.load(Size::U32, R2, R6, 60);
        asm.load(Size::U64, R8, R9, 8);
        asm.store(Size::U32, R10, -4, R7);
        asm.atomic_add(R9, 16, R1);
        asm.load_map(R1, 5, MapAs::Map);
        asm.load_map(R9, 6, MapAs::Value);
        asm.call(Helper::SocketAssign);
        asm.jump_if(If::Equal(R2, 6), end);
        asm.jump_if(If::NotEqual(R2, 6443), end);
        asm.jump_if(If::Zero(R0), end);
        asm.jump_if(If::Greater(R0, R8), end);
        asm.jump_if(If::Differs(R0, R2), end);
        asm.jump(end);
        asm.place(end);
        asm.exit();
        let encoded: Vec<_> = asm.finish().unwrap().into_iter().map(bytes).collect();
        let expected: &[[u8; 8]] = &[
            [0xbf, 0x16, 0, 0, 0, 0, 0, 0],             // r6 = r1
            [0xb7, 0x00, 0, 0, 0xfe, 0xff, 0xff, 0xff], // r0 = -2
            [0x07, 0x02, 0, 0, 0xfc, 0xff, 0xff, 0xff], // r2 += -4
            [0x54, 0x02, 0, 0, 0xff, 0, 0, 0],          // w2 &= 0xff
            [0xdc, 0x02, 0, 0, 16, 0, 0, 0],            // r2 = be16 r2
            [0x61, 0x62, 60, 0, 0, 0, 0, 0],            // r2 = *(u32 *)(r6 + 60)
            [0x79, 0x98, 8, 0, 0, 0, 0, 0],             // r8 = *(u64 *)(r9 + 8)
            [0x63, 0x7a, 0xfc, 0xff, 0, 0, 0, 0],       // *(u32 *)(r10 - 4) = r7
            [0xdb, 0x19, 16, 0, 0, 0, 0, 0],            // lock *(u64 *)(r9 + 16) += r1
            [0x18, 0x11, 0, 0, 5, 0, 0, 0],             // r1 = map 5
            [0; 8],
            [0x18, 0x29, 0, 0, 6, 0, 0, 0], // r9 = value of map 6
            [0; 8],
            [0x85, 0x00, 0, 0, 124, 0, 0, 0],     // call 124
            [0x16, 0x02, 5, 0, 6, 0, 0, 0],       // if w2 == 6 goto +5
            [0x56, 0x02, 4, 0, 0x2b, 0x19, 0, 0], // if w2 != 6443 goto +4
            [0x15, 0x00, 3, 0, 0, 0, 0, 0],       // if r0 == 0 goto +3
            [0x2d, 0x80, 2, 0, 0, 0, 0, 0],       // if r0 > r8 goto +2
            [0x5d, 0x20, 1, 0, 0, 0, 0, 0],       // if r0 != r2 goto +1
            [0x05, 0x00, 0, 0, 0, 0, 0, 0],       // goto +0
            [0x95, 0x00, 0, 0, 0, 0, 0, 0],       // exit
        ];
        assert_eq!(encoded, expected);
        assert_eq!(size_of::<Instruction>(), 8);
    }

    #[test]
    fn a_jump_goes_back_too_and_not_too_far() {
        let mut asm = Assembler::default();
        let start = asm.label();
        asm.place(start);
        asm.exit();
        asm.jump(start);
        assert_eq!(asm.finish().unwrap()[1].offset, -2);

        let far = |between: usize| {
            let mut asm = Assembler::default();
            let end = asm.label();
            asm.jump(end);
            (0..between).for_each(|_| asm.set(R0, 0));
            asm.place(end);
            asm.exit();
            asm.finish().map(|program| program[0].offset)
        };
        assert_eq!(far(32_767).unwrap(), i16::MAX);
        assert!(far(32_768).unwrap_err().to_string().contains("too many addresses"));
    }

    #[test]
    fn a_label_that_is_nowhere_is_an_error() {
        let mut asm = Assembler::default();
        let nowhere = asm.label();
        asm.jump(nowhere);
        assert!(asm.finish().unwrap_err().to_string().contains("not placed"));
    }
}
