//! An assembler for the instructions of eBPF (RFC 9669) that berth's programs contain.

use std::io;

/// A register of a BPF program. A call takes its arguments in R1 to R5, overwrites these registers,
/// and returns its result in R0. R6 to R9 keep their values. R10 points to the end of the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reg {
    R0 = 0,
    R1 = 1,
    R2 = 2,
    R3 = 3,
    R6 = 6,
    R7 = 7,
    R8 = 8,
    R9 = 9,
    R10 = 10,
}

/// Width of the memory that a load reads or a store writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    U32 = 0x00,
    U64 = 0x18,
}

/// Condition of a jump. `Equal` and `NotEqual` compare the lower 32 bits, the other conditions
/// compare 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum If {
    Equal(Reg, i32),
    NotEqual(Reg, i32),
    Zero(Reg),
    /// The first register, unsigned, is greater than the second.
    Greater(Reg, Reg),
    Differs(Reg, Reg),
}

/// Functions of the kernel that a BPF program can call (helpers). The numbers are those of
/// linux/bpf.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Helper {
    MapLookup = 1,
    MonotonicTime = 5,
    CurrentName = 16,
    SocketRelease = 86,
    NamespaceCookie = 122,
    SocketAssign = 124,
}

/// The value that the kernel puts in place of a map's descriptor when it loads a program: the
/// address of the map, or the address of the value of the map's only entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MapAs {
    Map = 1,
    Value = 2,
}

/// An instruction, in the layout of `struct bpf_insn` of linux/bpf.h.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) code: u8,
    registers: u8,
    pub(super) offset: i16,
    pub(super) immediate: i32,
}

/// The target of a jump. A program may jump to a label before the label is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label(usize);

// Parts of an instruction's code: classes, sources and operations. RFC 9669 gives the names.
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
    /// The index of the instruction at which each label was placed. `None` until the label is
    /// placed.
    labels: Vec<Option<usize>>,
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    fn emit(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        let registers = if cfg!(target_endian = "little") {
            from << 4 | to
        } else {
            to << 4 | from
        };
        self.instructions.push(Instruction {
            code,
            registers,
            offset,
            immediate,
        });
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

    /// Keeps the bits of `mask` in the register's lower 32 bits, and clears its upper 32 bits.
    pub(super) fn mask(&mut self, to: Reg, mask: i32) {
        self.emit(ALU | AND, to as u8, 0, 0, mask);
    }

    /// Converts the 16 bits of a port from host byte order to network byte order.
    pub(super) fn convert_to_network_order(&mut self, of: Reg) {
        self.emit(ALU | END | X, of as u8, 0, 0, 16);
    }

    pub(super) fn load(&mut self, size: Size, to: Reg, from: Reg, offset: i16) {
        self.emit(LDX | MEM | size as u8, to as u8, from as u8, offset, 0);
    }

    pub(super) fn store(&mut self, size: Size, to: Reg, offset: i16, from: Reg) {
        self.emit(STX | MEM | size as u8, to as u8, from as u8, offset, 0);
    }

    /// Adds the register `from` to 64 bits of memory. The addition is atomic, because other
    /// processors use the same memory.
    pub(super) fn atomic_add(&mut self, to: Reg, offset: i16, from: Reg) {
        self.emit(
            STX | ATOMIC | Size::U64 as u8,
            to as u8,
            from as u8,
            offset,
            i32::from(ADD),
        );
    }

    /// Loads a map by its descriptor, which must be open when the program is loaded. The load
    /// counts as two instructions.
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

    /// Makes the label mean the next instruction, so that jumps to the label go there.
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

    /// Returns the program.
    ///
    /// # Errors
    /// A label was not placed, or is further away than a jump reaches (32,767 instructions).
    pub(super) fn finish(mut self) -> io::Result<Vec<Instruction>> {
        let wrong = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        for (at, label) in self.jumps {
            let target = self.labels[label.0]
                .ok_or_else(|| wrong("a jump to a label that was not placed"))?;
            let offset = i16::try_from(target as i64 - at as i64 - 1);
            self.instructions[at].offset = offset.map_err(|_| {
                wrong("a jump of more than 32,767 instructions: too many addresses")
            })?;
        }
        Ok(self.instructions)
    }
}

#[cfg(test)]
mod tests {
    use super::Reg::*;
    use super::*;

    #[test]
    fn a_jump_can_go_back_but_not_too_far() {
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
        assert_eq!(far(32_768).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn an_unplaced_label_is_an_error() {
        let mut asm = Assembler::default();
        let nowhere = asm.label();
        asm.jump(nowhere);
        assert_eq!(
            asm.finish().unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
}
