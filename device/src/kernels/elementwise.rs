//! y = f(a, b), element by element. a, b, y: [rows, n].

#[cfg(not(target_arch = "nvptx64"))]
use super::linear::Activation;
use super::*;
use crate::arch::scalar::fma;
use crate::gpu::math::{activate, ln};

/// See the module head.
#[derive(Debug)]
pub struct Elementwise;

/// The function.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// a + b.
    Add = 0,
    /// a * b.
    Mul = 1,
    /// activation(a); no b.
    Activate = 2,
    /// activation(a) * b.
    ActivateMul = 3,
    /// a * (1 + beta * ln(1 + floor(p / original))), where p is the row's position: how Llama 4 and its like multiply
    /// queries beyond the context of the first training; no b.
    Lengthen = 4,
}

impl Function {
    /// The function numbered `number`.
    pub fn from_u32(number: u32) -> Option<Function> {
        use Function::*;
        [Add, Mul, Activate, ActivateMul, Lengthen].into_iter().find(|f| *f as u32 == number)
    }
}

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// A [`Function`].
    pub function: u32,
    /// An [`Activation`].
    pub activation: u32,
    /// Of [`Function::Lengthen`].
    pub beta: f32,
    /// Likewise, in positions; at least 1 there.
    pub original: u32,
}

impl Params {
    /// What [`Function::Lengthen`] multiplies a row at `position` with.
    pub(crate) fn lengthening(&self, position: u32) -> f32 {
        fma(self.beta, ln((1 + position / self.original) as f32), 1.0)
    }
}

slots! {
    A: read "a",
    B: optional "b",
    Y: write "y",
}

impl MacroKernel for Elementwise {
    const NAME: &'static str = "elementwise";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [a, b, y] = io else { unreachable!("slots were counted") };
        let Some(function) = Function::from_u32(p.function) else {
            return Err(format!("function {} is unknown", p.function));
        };
        if Activation::from_u32(p.activation).is_none() {
            return Err(format!("activation {} is unknown", p.activation));
        }
        if function == Function::Lengthen && p.original == 0 {
            return Err("0 positions of the first training, expected at least 1".to_owned());
        }
        if b.is_present() == matches!(function, Function::Activate | Function::Lengthen) {
            return Err(format!("{function:?} takes {} tensors", if b.is_present() { 1 } else { 2 }));
        }
        for (name, operand) in [("a", a), ("b", b), ("y", y)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, 2)?;
            rules::unit_stride(name, operand)?;
            rules::extent(name, operand, 0, a.extent[0])?;
            rules::extent(name, operand, 1, a.extent[1])?;
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [a, b, y] = core::array::from_fn(|i| call.tensor(i));
        let function = Function::from_u32(p.function).unwrap_or(Function::Add);
        let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
        let first = call.step.first_pos + call.task.row_first;
        for r in 0..call.rows(slot::A) {
            for c in 0..a.extent(1) {
                let x = a.get([r, c]);
                y.set(
                    [r, c],
                    match function {
                        Function::Add => x + b.get([r, c]),
                        Function::Mul => x * b.get([r, c]),
                        Function::Activate => activation.apply(x),
                        Function::ActivateMul => activation.apply(x) * b.get([r, c]),
                        Function::Lengthen => {
                            let times = (1 + (first + r as u32) / p.original) as f32;
                            x * (1.0 + p.beta * times.ln())
                        }
                    },
                );
            }
        }
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        const ADD: u32 = Function::Add as u32;
        const MUL: u32 = Function::Mul as u32;
        const ACTIVATE: u32 = Function::Activate as u32;
        const LENGTHEN: u32 = Function::Lengthen as u32;
        // SAFETY: the operands are the slots' and every index is below its extent; `b` is there unless the function is
        // of one tensor; a thread reads and writes its own elements, so `y` may be `a` or `b`.
        unsafe {
            let (a, b, y) = (call.tensor(slot::A), call.tensor(slot::B), call.tensor(slot::Y));
            let columns = a.extent(1);
            for i in block.mine(call.rows(&a) * columns) {
                let at = [i / columns, i % columns];
                let x = a.get(at);
                let value = match p.function {
                    ADD => x + b.get(at),
                    MUL => x * b.get(at),
                    ACTIVATE => activate(p.activation, x),
                    LENGTHEN => x * p.lengthening(call.first_pos() + call.row_first() + at[0]),
                    _ => activate(p.activation, x) * b.get(at),
                };
                y.set(at, value);
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [a, b, y] = core::array::from_fn(|i| call.tensor(i));
        if ![a, b, y].iter().all(crate::cpu::rows::has_unit_stride::<2>) {
            return Self::reference(p, call);
        }
        let function = Function::from_u32(p.function).unwrap_or(Function::Add);
        let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
        let (rows, first) = (call.rows(slot::A), call.step.first_pos + call.task.row_first);
        let factor = |r: usize| if function == Function::Lengthen { p.lengthening(first + r as u32) } else { 1.0 };
        scratch.isa.run(crate::cpu::rowwise::Elementwise { rows, function, activation, factor, a, b, y });
        Ok(())
    }
}
