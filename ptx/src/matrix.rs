//! Tensor cores: fragments in registers, matrices in shared memory.
//!
//! With g = lane / 4 and t = lane % 4, a register of a fragment holds two bf16 or one f32:
//! ```text
//! a, 16 x 16   a0 rows g, columns 2t and 2t + 1;  a1 rows g + 8;  a2, a3 the same with columns + 8
//! b, 16 x 8    b0 rows 2t and 2t + 1, column g;   b1 rows + 8
//! c, 16 x 8    c0, c1 row g, columns 2t, 2t + 1;  c2, c3 row g + 8
//! ```
//! Of bytes a register holds four, and what is said of columns 2t and 2t + 1 of `a`, and of rows of `b`, holds of 4t to
//! 4t + 3, with 16 for 8. (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "mma.m16n8k32"; of a warpgroup "Register
//! Fragments and Shared Memory Matrix Layouts", whose warp w has rows 16w to 16w + 15 of the sums, and eight columns
//! every four registers.)

use super::decode::{Op, Slot};
use super::machine::{ALL, Block, Machine, WARP};
use super::rows::Row;
use half::bf16;

/// What a warp has asked its warpgroup's tensor cores for.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Groups of products that have been closed.
    closed: u64,
    is_fenced: bool,
    /// Sums that are not in their registers.
    sums: Vec<Sums>,
    /// Products under way, in order.
    products: Vec<Product>,
    /// Registers that products not yet waited for read, each with its product's group and what it held then.
    read: Vec<(u64, Slot, Row)>,
}

#[derive(Debug)]
struct Product {
    group: u64,
    /// The first register of its sums.
    first: Slot,
    a: Left,
    b: u64,
    is_transposed: bool,
}

/// The first matrix of a product.
#[derive(Clone, Debug)]
enum Left {
    Shared(u64),
    /// What the registers of each warp hold, which nobody writes before the product is waited for.
    Registers(Vec<Row>),
}

/// Sums that products are, or were, under way for.
#[derive(Debug)]
struct Sums {
    /// Their registers, and what is to be in them.
    slots: Vec<Slot>,
    rows: Vec<Row>,
    /// The group of the last of the products.
    last: u64,
}

/// In registers whose product is under way.
const NOT_THERE: Row = [0x7fff_dead; WARP];

fn pair(bits: u64) -> [f64; 2] {
    let one = |bits: u16| f64::from(bf16::from_bits(bits).to_f32());
    [one(bits as u16), one((bits >> 16) as u16)]
}

/// The bytes of a register.
fn four(bits: u64) -> [i32; 4] {
    (bits as u32).to_le_bytes().map(|byte| i32::from(byte as i8))
}

/// A sum of exact products, rounded once; the chip rounds somewhere in between too.
fn sum(before: u64, products: f64) -> u64 {
    u64::from(((f64::from(f32::from_bits(before as u32)) + products) as f32).to_bits())
}

impl Machine<'_> {
    /// All lanes of the warp are here.
    pub(super) fn matrices(&mut self, b: usize, w: usize, op: &Op) -> Result<(), String> {
        match op {
            Op::LoadMatrices { d, from } => {
                let at = self.addresses(b, w, from);
                let block = &mut self.blocks[b];
                let mut rows = [[0; WARP]; 4];
                for (matrix, row) in rows.iter_mut().enumerate() {
                    for lane in 0..WARP {
                        // Lanes 8i to 8i + 7 say where the rows of matrix i are.
                        let start = at[8 * matrix + lane / 4];
                        if !start.is_multiple_of(16) {
                            return Err(format!("a row of a matrix at {start}, not a multiple of 16"));
                        }
                        let start = block.place(start, 16)? + 4 * (lane % 4);
                        let word = block.shared[start..start + 4].try_into().expect("four bytes");
                        row[lane] = u64::from(u32::from_le_bytes(word));
                    }
                }
                for (d, row) in d.iter().zip(&rows) {
                    block.warps[w].set(*d, ALL, row);
                }
            }
            Op::Product { are_bytes: true, d, a, b: right, c } => {
                self.report.products[0] += 1;
                let entry = self.entry;
                let warp = &mut self.blocks[b].warps[w];
                let (mut left, mut top) = ([[0; 32]; 16], [[0; 8]; 32]);
                for lane in 0..WARP {
                    let (g, t) = (lane / 4, lane % 4);
                    for (n, a) in a.iter().enumerate() {
                        let first = 4 * t + n / 2 * 16;
                        left[g + n % 2 * 8][first..first + 4].copy_from_slice(&four(warp.row(entry, *a)[lane]));
                    }
                    for (n, right) in right.iter().enumerate() {
                        for (i, byte) in four(warp.row(entry, *right)[lane]).into_iter().enumerate() {
                            top[4 * t + 16 * n + i][g] = byte;
                        }
                    }
                }
                let mut sums = [[0; WARP]; 4];
                for (n, sums) in sums.iter_mut().enumerate() {
                    let before = warp.row(entry, c[n]);
                    for lane in 0..WARP {
                        let (row, column) = (lane / 4 + n / 2 * 8, lane % 4 * 2 + n % 2);
                        let products = (0..32).map(|k| left[row][k] * top[k][column]).sum::<i32>();
                        sums[lane] = u64::from((before[lane] as i32).wrapping_add(products) as u32);
                    }
                }
                for (d, sums) in d.iter().zip(&sums) {
                    warp.set(*d, ALL, sums);
                }
            }
            Op::Product { are_bytes: false, d, a, b: right, c } => {
                self.report.products[0] += 1;
                let entry = self.entry;
                let warp = &mut self.blocks[b].warps[w];
                let (mut left, mut top) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
                for lane in 0..WARP {
                    let (g, t) = (lane / 4, lane % 4);
                    for (n, a) in a.iter().enumerate() {
                        let [x, y] = pair(warp.row(entry, *a)[lane]);
                        let (row, column) = (g + 8 * (n % 2), 2 * t + 8 * (n / 2));
                        (left[row][column], left[row][column + 1]) = (x, y);
                    }
                    for (n, right) in right.iter().enumerate() {
                        let [x, y] = pair(warp.row(entry, *right)[lane]);
                        (top[2 * t + 8 * n][g], top[2 * t + 8 * n + 1][g]) = (x, y);
                    }
                }
                let mut sums = [[0; WARP]; 4];
                for (n, sums) in sums.iter_mut().enumerate() {
                    let before = warp.row(entry, c[n]);
                    for lane in 0..WARP {
                        let (row, column) = (lane / 4 + 8 * (n / 2), 2 * (lane % 4) + n % 2);
                        sums[lane] = sum(before[lane], (0..16).map(|k| left[row][k] * top[k][column]).sum());
                    }
                }
                for (d, sums) in d.iter().zip(&sums) {
                    warp.set(*d, ALL, sums);
                }
            }
            Op::GroupProduct { d, a, b: right, is_transposed } => {
                self.report.products[1] += 1;
                let entry = self.entry;
                let n_warps = self.blocks[b].warps.len();
                let warp = &mut self.blocks[b].warps[w];
                if w / 4 * 4 + 4 > n_warps {
                    return Err("its warpgroup is not whole".to_owned());
                }
                let one = |slot| {
                    let row = warp.row(entry, slot);
                    match row.iter().find(|bits| **bits != row[0]) {
                        Some(other) => Err(format!("lanes have different matrices: {:#x} and {other:#x}", row[0])),
                        None => Ok(row[0]),
                    }
                };
                let left = if let [a] = a[..] {
                    Left::Shared(one(a)?)
                } else {
                    Left::Registers(a.iter().map(|slot| *warp.row(entry, *slot)).collect())
                };
                let right = one(*right)?;
                if !warp.groups.is_fenced {
                    return Err("no wgmma.fence since sums were last waited for".to_owned());
                }
                let group = warp.groups.closed;
                if let Left::Registers(rows) = &left {
                    warp.groups.read.extend(a.iter().zip(rows).map(|(slot, row)| (group, *slot, *row)));
                }
                match warp.groups.sums.iter_mut().find(|sums| sums.slots == *d) {
                    Some(sums) => sums.last = group,
                    None => {
                        let rows = d.iter().map(|slot| *warp.row(entry, *slot)).collect();
                        for slot in d {
                            warp.set(*slot, ALL, &NOT_THERE);
                        }
                        warp.groups.sums.push(Sums { slots: d.clone(), rows, last: group });
                    }
                }
                let is_transposed = *is_transposed;
                warp.groups.products.push(Product { group, first: d[0], a: left, b: right, is_transposed });
                // Sooner or later; in order.
                if self.random(2) == 0 {
                    self.multiply(b, w, u64::MAX)?;
                }
            }
            Op::GroupFence => self.blocks[b].warps[w].groups.is_fenced = true,
            Op::GroupCommit => self.blocks[b].warps[w].groups.closed += 1,
            Op::GroupWait(left) => {
                let closed = self.blocks[b].warps[w].groups.closed;
                let over = closed.saturating_sub(u64::from(*left));
                self.multiply(b, w, over)?;
                let entry = self.entry;
                let warp = &mut self.blocks[b].warps[w];
                let mut groups = std::mem::take(&mut warp.groups);
                for (_, slot, row) in groups.read.extract_if(.., |(group, ..)| *group < over) {
                    if *warp.row(entry, slot) != row {
                        return Err(
                            "a register that a product reads was written before the product was waited for".to_owned()
                        );
                    }
                }
                let there: Vec<_> = groups.sums.extract_if(.., |sums| sums.last < over).collect();
                groups.is_fenced &= there.is_empty();
                for (slot, row) in there.iter().flat_map(|sums| sums.slots.iter().zip(&sums.rows)) {
                    if *warp.row(entry, *slot) != NOT_THERE {
                        return Err("a register of sums was written before its products were waited for".to_owned());
                    }
                    warp.set(*slot, ALL, row);
                }
                warp.groups = groups;
            }
            _ => unreachable!("not a tensor core's"),
        }
        Ok(())
    }

    /// Does the warp's products of groups before `over`.
    fn multiply(&mut self, b: usize, w: usize, over: u64) -> Result<(), String> {
        let block = &mut self.blocks[b];
        let mut groups = std::mem::take(&mut block.warps[w].groups);
        let n = groups.products.iter().take_while(|product| product.group < over).count();
        for Product { first, a, b: right, is_transposed, .. } in groups.products.drain(..n) {
            let sums = groups.sums.iter_mut().find(|sums| sums.slots[0] == first);
            let rows = &mut sums.expect("sums stay until nothing is under way for them").rows;
            let left = match a {
                Left::Shared(a) => matrix(block, a, 16 * (w as u64 % 4), 16, false)?,
                Left::Registers(rows) => {
                    let mut left = vec![[0.0; 16]; 16];
                    for (n, bits) in rows.iter().enumerate() {
                        for (lane, bits) in bits.iter().enumerate() {
                            let (row, column) = (lane / 4 + 8 * (n % 2), 2 * (lane % 4) + 8 * (n / 2));
                            [left[row][column], left[row][column + 1]] = pair(*bits);
                        }
                    }
                    left
                }
            };
            let top = matrix(block, right, 0, 2 * rows.len() as u64, is_transposed)?;
            for (number, row) in rows.iter_mut().enumerate() {
                for lane in 0..WARP {
                    let r = lane / 4 + 8 * (number / 2 % 2);
                    let column = 8 * (number / 4) + 2 * (lane % 4) + number % 2;
                    let products = left[r].iter().zip(&top[column]).map(|(a, b)| a * b).sum();
                    row[lane] = sum(row[lane], products);
                }
            }
        }
        block.warps[w].groups = groups;
        Ok(())
    }
}

/// Rows `first..first + n` of a matrix, of which k is innermost, or n where it `is_transposed`: sixteen columns.
fn matrix(block: &Block, descriptor: u64, first: u64, n: u64, is_transposed: bool) -> Result<Vec<[f64; 16]>, String> {
    let field = |bit: u32| ((descriptor >> bit) & 0x3fff) << 4;
    let (start, leading, stride) = (field(0), field(16), field(32));
    // Bytes of the row that a swizzle is about: 16-byte units are exchanged by the number of the 128-byte line.
    let (row_bytes, units) = match descriptor >> 62 {
        0 => (16, 0),
        1 => (128, 7),
        2 => (64, 3),
        _ => (32, 1),
    };
    let pattern: u64 = 8 * row_bytes;
    if (descriptor >> 49) & 7 != 0 || units > 0 && start % pattern >= row_bytes {
        return Err(format!("the matrix {descriptor:#x} does not begin where its swizzle does"));
    }
    if is_transposed && row_bytes != 128 {
        return Err(format!(
            "the transposed matrix {descriptor:#x} is not understood but with the swizzle of 128 bytes"
        ));
    }
    let element = |row: u64, k: u64| -> Result<f64, String> {
        let at = if is_transposed {
            // By 64 numbers of n, of eight k's each.
            start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * row_bytes
        } else {
            let at = start + row / 8 * stride + row % 8 * row_bytes;
            if units == 0 { at + k / 8 * leading + k % 8 * 2 } else { at + 2 * k }
        };
        let at = at ^ ((at >> 7 & units) << 4);
        let at = block.place(at, 2)?;
        Ok(f64::from(bf16::from_le_bytes([block.shared[at], block.shared[at + 1]]).to_f32()))
    };
    (first..first + n)
        .map(|row| {
            let mut values = [0.0; 16];
            for (k, value) in values.iter_mut().enumerate() {
                *value = element(row, k as u64)?;
            }
            Ok(values)
        })
        .collect()
}
