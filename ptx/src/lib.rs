//! PTX run instruction by instruction on a machine without a GPU: what rustc, LLVM and our own assembly made of the
//! kernels, where perpetua's simulated GPU (`perpetua_device::simt`) runs their source.
//!
//! ```text
//! text ─parse─▶ statements ─decode─▶ instructions, registers as rows of 32 lanes ─machine─▶ memory as the kernel leaves it
//! ```
//!
//! Semantics are those of the PTX ISA reference, version 8.6, for the instructions that the kernels are made of;
//! another one is an error that names it. Nothing here is shared with the simulated GPU: fragment layouts, matrix
//! descriptors, barriers' phases and copies are read a second time from the reference, so that an error in the one
//! shows against the other.
//!
//! Lanes of a warp run together where they can and part where they must, in an order that a seed decides; warps and
//! blocks take turns by it too. Copies land late; a warpgroup's sums are not there before they are waited for. What is
//! checked: every address against the launch's memory, and its alignment; that all lanes an instruction names come to
//! that same instruction (barriers that the compiler copied stop here); barriers' counts and phases; that somebody can
//! go on. What is not: races and the order of memory accesses, which are one after another here; the simulated GPU
//! judges those.
//!
//! ```
//! use perpetua_ptx::{Launch, Memory, Module};
//!
//! let module = Module::parse(
//!     ".version 8.1
//!     .target sm_90a
//!     .address_size 64
//!     .visible .entry double(
//!         .param .u64 double_param_0
//!     )
//!     {
//!         .reg .b32 %r<3>;
//!         .reg .b64 %rd<4>;
//!         ld.param.b64 %rd1, [double_param_0];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %rd2, %r1, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         ld.global.b32 %r2, [%rd3];
//!         shl.b32 %r2, %r2, 1;
//!         st.global.b32 [%rd3], %r2;
//!         ret;
//!     }",
//! )?;
//! let (address, mut words) = (0x10_0000u64, [21u32; 64]);
//! let mut memory = Memory::default();
//! // SAFETY: the words outlive the launch, and nobody else touches them meanwhile.
//! unsafe { memory.add("words", address, words.as_mut_ptr().cast(), 4 * words.len() as u64, false) };
//! let launch = Launch { entry: "double", threads: 64, params: &[&address.to_le_bytes()], ..Launch::default() };
//! let report = module.launch(&launch, &memory)?;
//! assert_eq!(words, [42; 64]);
//! assert_eq!(report.instructions, 2 * 8);
//! # Ok::<(), perpetua_ptx::PtxError>(())
//! ```

// Where it is allowed, each block carries its proof.
#![deny(unsafe_code)]

mod assembled;
mod decode;
mod machine;
mod matrix;
#[allow(unsafe_code, reason = "a launch's memory, by address")]
mod memory;
mod parse;
mod pipeline;
mod rows;

pub use assembled::{Assembled, MachineInstruction, SCOREBOARDS};
pub use machine::{Launch, Marks, Report};
pub use memory::Memory;
pub use pipeline::InstructionCache;

use decode::{Entry, Layout};
use std::collections::BTreeMap;

/// Why PTX was not run to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtxError {
    /// The text is not PTX as it is understood here.
    #[error("line {line}: {what}")]
    Unread {
        /// From 1.
        line: u32,
        /// What is not understood.
        what: String,
    },
    /// The module has no such entry.
    #[error("there is no entry {0}")]
    NoEntry(String),
    /// The launch does not fit the entry.
    #[error("{entry}: {what}")]
    Launch {
        /// Its name.
        entry: String,
        /// Given and expected.
        what: String,
    },
    /// An instruction did what it must not, or could not be done.
    #[error("line {line}, block {block}, warp {warp}, lanes {lanes:#010x}: {what}")]
    Fault {
        /// Of the text, from 1.
        line: u32,
        /// Index in the grid.
        block: u32,
        /// Number in the block.
        warp: u32,
        /// Those that ran the instruction.
        lanes: u32,
        /// What.
        what: String,
    },
    /// Nobody can go on.
    #[error("nobody can go on: {0}")]
    Stuck(String),
}

impl PtxError {
    fn unread(line: u32, what: String) -> PtxError {
        PtxError::Unread { line, what }
    }
}

/// A module that can be launched.
#[derive(Debug)]
pub struct Module {
    layout: Layout,
    entries: BTreeMap<String, Entry>,
}

impl Module {
    /// The module that `text` is.
    ///
    /// # Errors
    /// What is not understood, with its line.
    pub fn parse(text: &str) -> Result<Module, PtxError> {
        let (variables, entries) = parse::parse(text)?;
        let layout = Layout::new(&variables);
        let entries = entries
            .iter()
            .map(|entry| Ok((entry.name.to_owned(), decode::decode(entry, &layout)?)))
            .collect::<Result<_, PtxError>>()?;
        Ok(Module { layout, entries })
    }

    /// Names of the entries.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Runs a launch to its end: every block is resident.
    ///
    /// # Errors
    /// See [`PtxError`]. Memory is then as the kernel left it.
    pub fn launch(&self, launch: &Launch<'_>, memory: &Memory) -> Result<Report, PtxError> {
        self.launch_beside(launch, memory, &mut || ())
    }

    /// As [`Module::launch`]. `host` is called now and then, between instructions: what the host does meanwhile.
    ///
    /// # Errors
    /// As [`Module::launch`].
    pub fn launch_beside(
        &self,
        launch: &Launch<'_>,
        memory: &Memory,
        host: &mut dyn FnMut(),
    ) -> Result<Report, PtxError> {
        let entry = self.entries.get(launch.entry).ok_or_else(|| PtxError::NoEntry(launch.entry.to_owned()))?;
        machine::run(entry, &self.layout, launch, memory, host)
    }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "words of a launch")]
mod tests;
