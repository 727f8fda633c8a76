//! What ptxas makes of PTX: the machine code's instructions, the lines that they come from, and how long they have
//! their warps wait.

use gimli::{DebugLine, DebugLineOffset, LittleEndian};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget};
use perpetua::ptx::{Assembled, MachineInstruction, SCOREBOARDS};
use std::error::Error;
use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;

/// Bytes of an instruction, and where among its bits stand, as every disassembly of sm_70 and later code that shows
/// them has it, the cycles for which its warp waits, four bits; the scoreboard that its result uses, three bits, all of
/// them set if none does; and those that it waits for, six.
const BYTES: usize = 16;
const CYCLES_AT: u32 = 105;
const USES_AT: u32 = 110;
const WAITS_AT: u32 = 116;

/// Where lines say which machine code they are of.
const LINES: &str = ".nv_debug_line_sass";

/// `entry` of `ptx`, which is for `arch`, assembled by `ptxas`: a minute or two, unless that has been done before.
pub(crate) fn assembled(ptxas: &Path, arch: &str, ptx: &str, entry: &str) -> Result<Assembled, Box<dyn Error>> {
    let mut hasher = DefaultHasher::new();
    (ptxas, arch, ptx).hash(&mut hasher);
    let name = format!("perpetua-{:016x}", hasher.finish());
    let cubin = std::env::temp_dir().join(&name).with_extension("cubin");
    // Two of these may run at once.
    let [text, unfinished] =
        ["ptx", "tmp"].map(|what| std::env::temp_dir().join(format!("{name}-{}.{what}", std::process::id())));
    if !cubin.is_file() {
        eprintln!("{} assembles the kernel", ptxas.display());
        std::fs::write(&text, ptx)?;
        let mut command = Command::new(ptxas);
        command.arg("-lineinfo").arg(format!("-arch={arch}")).arg(&text).arg("-o").arg(&unfinished);
        let output = command.output();
        std::fs::remove_file(&text)?;
        let refuse = |what: &dyn Display| format!("{}: {what}", ptxas.display());
        let output = output.map_err(|e| refuse(&e))?;
        if !output.status.success() {
            return Err(refuse(&format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr))).into());
        }
        std::fs::rename(&unfinished, &cubin).map_err(|e| refuse(&format!("what it should have made: {e}")))?;
    }
    read(&std::fs::read(&cubin)?, entry).map_err(|e| format!("{}: {e}", cubin.display()).into())
}

/// `entry` of `cubin`.
fn read(cubin: &[u8], entry: &str) -> Result<Assembled, Box<dyn Error>> {
    let file = ElfFile64::<object::LittleEndian>::parse(cubin)?;
    let section = |name: &str| file.section_by_name(name).ok_or(format!("there is no {name}"));
    let code = section(&format!(".text.{entry}"))?;
    let (text, lines) = (code.data()?, section(LINES)?);
    // Sequences of lines begin at an address that the linker would put in: at 0 for the entry, and beyond everything
    // for others.
    let mut program = lines.data()?.to_vec();
    for (offset, relocation) in lines.relocations() {
        let RelocationTarget::Symbol(symbol) = relocation.target() else { continue };
        let is_entry = file.symbol_by_index(symbol)?.section_index() == Some(code.index());
        let address = if is_entry { 0 } else { u64::MAX / 2 };
        let at = offset as usize;
        program.get_mut(at..at + 8).ok_or("an address outside the lines")?.copy_from_slice(&address.to_le_bytes());
    }
    let debug_line = DebugLine::new(&program, LittleEndian);
    let mut begins: Vec<(u64, u32)> = Vec::new();
    let mut offset = 0;
    while offset < program.len() {
        let unit = debug_line.program(DebugLineOffset(offset), 8, None, None)?;
        offset += unit.header().unit_length() + size_of::<u32>();
        let mut rows = unit.rows();
        while let Some((_, row)) = rows.next_row()? {
            let line = row.line().map_or(0, |line| line.get() as u32);
            if !row.end_sequence() && row.address() < text.len() as u64 {
                begins.push((row.address(), line));
            }
        }
    }
    begins.sort_by_key(|(address, _)| *address);
    let mut line = 0;
    let mut begins = begins.into_iter().peekable();
    let instructions = text.chunks_exact(BYTES).enumerate().map(|(number, bytes)| {
        while let Some((_, begun)) = begins.next_if(|(address, _)| *address <= (number * BYTES) as u64) {
            line = begun;
        }
        let bits = u128::from_le_bytes(bytes.try_into().expect("as many as were asked for"));
        let uses = match (bits >> USES_AT) as u8 & 7 {
            board if usize::from(board) < SCOREBOARDS => 1 << board,
            _ => 0,
        };
        let (cycles, waits) = ((bits >> CYCLES_AT) as u32 & 15, (bits >> WAITS_AT) as u8 & 63);
        MachineInstruction { line, cycles, waits, uses }
    });
    Ok(Assembled { instructions: instructions.collect() })
}
