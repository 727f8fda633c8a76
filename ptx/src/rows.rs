//! What arithmetic instructions do to a row: a register of each lane of a warp.
//!
//! A row holds 64 bits a lane; narrower values stand in the low bits, the others zero. All lanes are computed, those
//! that do not take part too: the machine keeps the others' old values.

use super::machine::WARP;
use half::{bf16, f16};

/// A register, of every lane.
pub(super) type Row = [u64; WARP];

/// d = f(a), f(a, b) and so on.
pub(super) type Unary = fn(&mut Row, &Row);
/// See [`Unary`].
pub(super) type Binary = fn(&mut Row, &Row, &Row);
/// See [`Unary`].
pub(super) type Ternary = fn(&mut Row, &Row, &Row, &Row);
/// A bit for each lane.
pub(super) type Compare = fn(&Row, &Row) -> u32;

macro_rules! row {
    (|$a:ident| $value:expr) => {{
        fn row(d: &mut Row, a: &Row) {
            for lane in 0..WARP {
                let $a = a[lane];
                d[lane] = $value;
            }
        }
        row
    }};
    (|$a:ident, $b:ident| $value:expr) => {{
        fn row(d: &mut Row, a: &Row, b: &Row) {
            for lane in 0..WARP {
                let ($a, $b) = (a[lane], b[lane]);
                d[lane] = $value;
            }
        }
        row
    }};
    (|$a:ident, $b:ident, $c:ident| $value:expr) => {{
        fn row(d: &mut Row, a: &Row, b: &Row, c: &Row) {
            for lane in 0..WARP {
                let ($a, $b, $c) = (a[lane], b[lane], c[lane]);
                d[lane] = $value;
            }
        }
        row
    }};
}

macro_rules! compare {
    (|$a:ident, $b:ident| $holds:expr) => {{
        fn row(a: &Row, b: &Row) -> u32 {
            let mut lanes = 0;
            for lane in 0..WARP {
                let ($a, $b) = (a[lane], b[lane]);
                lanes |= u32::from($holds) << lane;
            }
            lanes
        }
        row
    }};
}

fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn f64_of(bits: u64) -> f64 {
    f64::from_bits(bits)
}

/// A result of f32; every NaN is the one that the chip makes.
fn of_f32(value: f32) -> u64 {
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
}

fn of_f64(value: f64) -> u64 {
    value.to_bits()
}

/// A subnormal is zero, with its sign.
fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

/// A shift of as many bits as there are, or more, leaves none.
fn shift(bits: u64, by: u64, width: u64, f: impl Fn(u64, u64) -> u64) -> u64 {
    if by >= width { 0 } else { f(bits, by) }
}

/// Bits `first..first + n` of the low `width`.
fn field(bits: u64, first: u64, n: u64, width: u64) -> u64 {
    let (first, n) = (first & 0xff, n & 0xff);
    let shifted = shift(bits, first, width, |bits, by| bits >> by);
    if n >= width { shifted } else { shifted & ((1 << n) - 1) }
}

/// Likewise with the field's highest bit, or the number's where the field goes beyond it, in all bits above.
fn signed_field(bits: u64, first: u64, n: u64, width: u64) -> u64 {
    let (first, n) = (first & 0xff, n & 0xff);
    if n == 0 {
        return 0;
    }
    let number = (bits << (64 - width)).cast_signed() >> (64 - width);
    let shifted = number >> first.min(width - 1);
    let above = 64 - n.min(width);
    let field = ((shifted << above) >> above).cast_unsigned();
    if width == 32 { field & LOW } else { field }
}

const LOW: u64 = 0xffff_ffff;

/// The bits of the nearest bf16.
fn bf16_of(bits: u64) -> u64 {
    let value = f32_of(bits);
    u64::from(if value.is_nan() { 0x7fff } else { bf16::from_f32(value).to_bits() })
}

/// Of eight bytes those four that the nibbles of `by` name, the lowest first; a nibble's high bit says that it is the
/// byte's sign eight times.
fn permuted(bytes: u64, by: u64) -> u64 {
    (0..4).fold(0, |all, at| {
        let nibble = by >> (4 * at);
        let byte = bytes >> (8 * (nibble & 7)) & 0xff;
        let byte = if nibble & 8 == 0 { byte } else { 0xff * (byte >> 7) };
        all | byte << (8 * at)
    })
}

/// What PTX leaves open: division by zero.
fn divided(a: u64, b: u64) -> u64 {
    a.checked_div(b).unwrap_or(u64::MAX)
}

/// The instruction `opcode` of one operand.
pub(super) fn unary(opcode: &str) -> Option<Unary> {
    Some(match opcode {
        "mov.b16" | "mov.u16" | "mov.b32" | "mov.u32" | "mov.s32" | "mov.f32" | "mov.b64" | "mov.u64" | "mov.s64"
        | "mov.f64" | "cvt.u32.u16" | "cvt.u64.u32" | "cvt.u64.u16" | "cvta.to.global.u64" | "cvta.global.u64" => {
            row!(|a| a)
        }
        "cvt.u16.u32" | "cvt.u16.u64" => row!(|a| a & 0xffff),
        "cvt.u32.u64" => row!(|a| a & LOW),
        "cvt.s64.s32" => row!(|a| i64::from(a as i32).cast_unsigned()),
        "cvt.f32.f16" => row!(|a| of_f32(f16::from_bits(a as u16).to_f32())),
        "cvt.rn.f16.f32" => row!(|a| {
            let value = f32_of(a);
            u64::from(if value.is_nan() { 0x7fff } else { f16::from_f32(value).to_bits() })
        }),
        "cvt.f32.bf16" => row!(|a| of_f32(bf16::from_bits(a as u16).to_f32())),
        "cvt.rn.bf16.f32" => row!(|a| bf16_of(a)),
        "cvt.f64.f32" => row!(|a| of_f64(f64::from(f32_of(a)))),
        "cvt.rn.f32.f64" => row!(|a| of_f32(f64_of(a) as f32)),
        "cvt.rn.f32.u16" | "cvt.rn.f32.u32" | "cvt.rn.f32.u64" => row!(|a| of_f32(a as f32)),
        // Towards zero, to the nearest number there is; 0 for a NaN, as Rust has it.
        "cvt.rzi.u32.f32" => row!(|a| u64::from(f32_of(a) as u32)),
        "cvt.rzi.f32.f32" => row!(|a| of_f32(f32_of(a).trunc())),
        "cvt.s8.s32" | "cvt.s8.s64" => row!(|a| u64::from(i16::from(a as u8 as i8).cast_unsigned())),
        "cvt.rn.f32.s8" => row!(|a| of_f32(f32::from(a as u8 as i8))),
        "cvt.rn.f32.s16" => row!(|a| of_f32(f32::from(a as u16 as i16))),
        "cvt.rn.f32.s32" => row!(|a| of_f32(a as u32 as i32 as f32)),
        "cvt.rn.f64.u32" | "cvt.rn.f64.u64" => row!(|a| of_f64(a as f64)),
        "neg.f32" => row!(|a| a ^ 0x8000_0000),
        "abs.f32" => row!(|a| a & 0x7fff_ffff),
        "neg.f64" => row!(|a| a ^ (1 << 63)),
        "neg.s32" => row!(|a| u64::from((a as u32).wrapping_neg())),
        "neg.s64" => row!(|a| a.wrapping_neg()),
        "not.b16" => row!(|a| !a & 0xffff),
        "not.b32" => row!(|a| !a & LOW),
        "not.b64" => row!(|a| !a),
        "popc.b32" | "popc.b64" => row!(|a| u64::from(a.count_ones())),
        "clz.b32" => row!(|a| u64::from((a as u32).leading_zeros())),
        "rcp.rn.f32" => row!(|a| of_f32(1.0 / f32_of(a))),
        "sqrt.rn.f32" => row!(|a| of_f32(f32_of(a).sqrt())),
        "rcp.approx.ftz.f32" => row!(|a| of_f32(flushed(1.0 / flushed(f32_of(a))))),
        "rsqrt.approx.ftz.f32" => row!(|a| of_f32((1.0 / f64::from(flushed(f32_of(a))).sqrt()) as f32)),
        // Two units in the last place on the chip; here rounded once.
        "ex2.approx.ftz.f32" => row!(|a| of_f32(flushed(f64::from(flushed(f32_of(a))).exp2() as f32))),
        _ => return None,
    })
}

/// The instruction `opcode` of two operands.
pub(super) fn binary(opcode: &str) -> Option<Binary> {
    Some(match opcode {
        "add.s16" | "add.u16" => row!(|a, b| a.wrapping_add(b) & 0xffff),
        "add.s32" | "add.u32" => row!(|a, b| a.wrapping_add(b) & LOW),
        "add.s64" | "add.u64" => row!(|a, b| a.wrapping_add(b)),
        "sub.s16" | "sub.u16" => row!(|a, b| a.wrapping_sub(b) & 0xffff),
        "sub.s32" | "sub.u32" => row!(|a, b| a.wrapping_sub(b) & LOW),
        "sub.s64" | "sub.u64" => row!(|a, b| a.wrapping_sub(b)),
        "mul.lo.s16" | "mul.lo.u16" => row!(|a, b| a.wrapping_mul(b) & 0xffff),
        "mul.lo.s32" | "mul.lo.u32" => row!(|a, b| a.wrapping_mul(b) & LOW),
        "mul.lo.s64" | "mul.lo.u64" => row!(|a, b| a.wrapping_mul(b)),
        "mul.wide.u16" | "mul.wide.u32" => row!(|a, b| a.wrapping_mul(b & LOW)),
        "mul.wide.s32" => row!(|a, b| (i64::from(a as i32) * i64::from(b as i32)).cast_unsigned()),
        "mul.hi.u32" => row!(|a, b| (a.wrapping_mul(b & LOW)) >> 32),
        "mul.hi.u64" => row!(|a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        "div.u16" | "div.u32" | "div.u64" => row!(|a, b| divided(a, b)),
        "rem.u16" | "rem.u32" | "rem.u64" => row!(|a, b| a.checked_rem(b).unwrap_or(a)),
        "min.u16" | "min.u32" | "min.u64" => row!(|a, b| a.min(b)),
        "max.u16" | "max.u32" | "max.u64" => row!(|a, b| a.max(b)),
        "min.s32" => row!(|a, b| if (a as i32) < b as i32 { a } else { b & LOW }),
        "max.s32" => row!(|a, b| if (a as i32) > b as i32 { a } else { b & LOW }),
        "min.s64" => row!(|a, b| a.cast_signed().min(b.cast_signed()).cast_unsigned()),
        "max.s64" => row!(|a, b| a.cast_signed().max(b.cast_signed()).cast_unsigned()),
        "and.b16" => row!(|a, b| a & b & 0xffff),
        "and.b32" => row!(|a, b| a & b & LOW),
        "and.b64" => row!(|a, b| a & b),
        "or.b16" => row!(|a, b| (a | b) & 0xffff),
        "or.b32" => row!(|a, b| (a | b) & LOW),
        "or.b64" => row!(|a, b| a | b),
        "xor.b16" => row!(|a, b| (a ^ b) & 0xffff),
        "xor.b32" => row!(|a, b| (a ^ b) & LOW),
        "xor.b64" => row!(|a, b| a ^ b),
        "shl.b16" => row!(|a, b| shift(a, b & LOW, 16, |a, by| (a << by) & 0xffff)),
        "shl.b32" => row!(|a, b| shift(a, b & LOW, 32, |a, by| (a << by) & LOW)),
        "shl.b64" => row!(|a, b| shift(a, b & LOW, 64, |a, by| a << by)),
        "shr.s16" => row!(|a, b| u64::from(((a as i16) >> (b & LOW).min(15)).cast_unsigned())),
        "shr.u16" => row!(|a, b| shift(a, b & LOW, 16, |a, by| a >> by)),
        "shr.u32" => row!(|a, b| shift(a, b & LOW, 32, |a, by| a >> by)),
        "shr.u64" => row!(|a, b| shift(a, b & LOW, 64, |a, by| a >> by)),
        "shr.s32" => row!(|a, b| u64::from(((a as i32) >> (b & LOW).min(31)).cast_unsigned())),
        "shr.s64" => row!(|a, b| (a.cast_signed() >> (b & LOW).min(63)).cast_unsigned()),
        "add.rn.f32" => row!(|a, b| of_f32(f32_of(a) + f32_of(b))),
        "sub.rn.f32" => row!(|a, b| of_f32(f32_of(a) - f32_of(b))),
        "mul.rn.f32" => row!(|a, b| of_f32(f32_of(a) * f32_of(b))),
        "div.rn.f32" => row!(|a, b| of_f32(f32_of(a) / f32_of(b))),
        // The other operand for a NaN, as Rust has it.
        "min.f32" => row!(|a, b| of_f32(f32_of(a).min(f32_of(b)))),
        "max.f32" => row!(|a, b| of_f32(f32_of(a).max(f32_of(b)))),
        "add.rn.f64" => row!(|a, b| of_f64(f64_of(a) + f64_of(b))),
        "sub.rn.f64" => row!(|a, b| of_f64(f64_of(a) - f64_of(b))),
        "mul.rn.f64" => row!(|a, b| of_f64(f64_of(a) * f64_of(b))),
        "div.rn.f64" => row!(|a, b| of_f64(f64_of(a) / f64_of(b))),
        // The first in the high half.
        "cvt.rn.bf16x2.f32" => row!(|a, b| bf16_of(a) << 16 | bf16_of(b)),
        _ => return None,
    })
}

/// The instruction `opcode` of three operands.
pub(super) fn ternary(opcode: &str) -> Option<Ternary> {
    Some(match opcode {
        "fma.rn.f32" => row!(|a, b, c| of_f32(f32_of(a).mul_add(f32_of(b), f32_of(c)))),
        "fma.rn.f64" => row!(|a, b, c| of_f64(f64_of(a).mul_add(f64_of(b), f64_of(c)))),
        "mad.lo.s32" | "mad.lo.u32" => row!(|a, b, c| a.wrapping_mul(b).wrapping_add(c) & LOW),
        "mad.lo.s64" | "mad.lo.u64" => row!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        "mad.wide.u32" => row!(|a, b, c| a.wrapping_mul(b & LOW).wrapping_add(c)),
        "bfe.s32" => row!(|a, first, n| signed_field(a, first, n, 32)),
        "bfe.s64" => row!(|a, first, n| signed_field(a, first, n, 64)),
        "bfe.u32" => row!(|a, first, n| field(a, first, n, 32)),
        "bfe.u64" => row!(|a, first, n| field(a, first, n, 64)),
        // The high word of `b:a` shifted left by `c` modulo 32; the low word of it shifted right.
        "shf.l.wrap.b32" => row!(|a, b, c| ((((b & LOW) << 32) | (a & LOW)) << (c & 31)) >> 32),
        "shf.r.wrap.b32" => row!(|a, b, c| ((((b & LOW) << 32) | (a & LOW)) >> (c & 31)) & LOW),
        "dp4a.s32.s32" => row!(|a, b, c| {
            let pairs = (a as u32).to_le_bytes().into_iter().zip((b as u32).to_le_bytes());
            let products = pairs.map(|(a, b)| i32::from(a as i8) * i32::from(b as i8));
            u64::from(products.fold(c as u32 as i32, i32::wrapping_add) as u32)
        }),
        "prmt.b32" => row!(|a, b, c| permuted(a & LOW | b << 32, c)),
        _ => return None,
    })
}

/// The comparison `opcode`.
pub(super) fn compare(opcode: &str) -> Option<Compare> {
    Some(match opcode {
        "setp.eq.b16" | "setp.eq.u16" | "setp.eq.s16" => compare!(|a, b| a & 0xffff == b & 0xffff),
        "setp.ne.b16" | "setp.ne.u16" | "setp.ne.s16" => compare!(|a, b| a & 0xffff != b & 0xffff),
        "setp.eq.b32" | "setp.eq.u32" | "setp.eq.s32" => compare!(|a, b| a & LOW == b & LOW),
        "setp.ne.b32" | "setp.ne.u32" | "setp.ne.s32" => compare!(|a, b| a & LOW != b & LOW),
        "setp.eq.b64" | "setp.eq.u64" | "setp.eq.s64" => compare!(|a, b| a == b),
        "setp.ne.b64" | "setp.ne.u64" | "setp.ne.s64" => compare!(|a, b| a != b),
        "setp.lt.u16" | "setp.lt.u32" => compare!(|a, b| a & LOW < b & LOW),
        "setp.le.u16" | "setp.le.u32" => compare!(|a, b| a & LOW <= b & LOW),
        "setp.gt.u16" | "setp.gt.u32" => compare!(|a, b| a & LOW > b & LOW),
        "setp.ge.u16" | "setp.ge.u32" => compare!(|a, b| a & LOW >= b & LOW),
        "setp.lt.u64" => compare!(|a, b| a < b),
        "setp.le.u64" => compare!(|a, b| a <= b),
        "setp.gt.u64" => compare!(|a, b| a > b),
        "setp.ge.u64" => compare!(|a, b| a >= b),
        "setp.lt.s32" => compare!(|a, b| (a as i32) < b as i32),
        "setp.le.s32" => compare!(|a, b| a as i32 <= b as i32),
        "setp.gt.s32" => compare!(|a, b| a as i32 > b as i32),
        "setp.ge.s32" => compare!(|a, b| a as i32 >= b as i32),
        "setp.lt.s64" => compare!(|a, b| a.cast_signed() < b.cast_signed()),
        "setp.le.s64" => compare!(|a, b| a.cast_signed() <= b.cast_signed()),
        "setp.gt.s64" => compare!(|a, b| a.cast_signed() > b.cast_signed()),
        "setp.ge.s64" => compare!(|a, b| a.cast_signed() >= b.cast_signed()),
        "setp.eq.f32" => compare!(|a, b| f32_of(a) == f32_of(b)),
        // Without a `u`, nothing holds of a NaN, unequal least of all.
        "setp.ne.f32" => compare!(|a, b| f32_of(a) < f32_of(b) || f32_of(a) > f32_of(b)),
        "setp.lt.f32" => compare!(|a, b| f32_of(a) < f32_of(b)),
        "setp.le.f32" => compare!(|a, b| f32_of(a) <= f32_of(b)),
        "setp.gt.f32" => compare!(|a, b| f32_of(a) > f32_of(b)),
        "setp.ge.f32" => compare!(|a, b| f32_of(a) >= f32_of(b)),
        "setp.equ.f32" => compare!(|a, b| !(f32_of(a) < f32_of(b) || f32_of(a) > f32_of(b))),
        "setp.neu.f32" => compare!(|a, b| f32_of(a) != f32_of(b)),
        "setp.ltu.f32" => compare!(|a, b| f32_of(a).partial_cmp(&f32_of(b)).is_none_or(|order| order.is_lt())),
        "setp.leu.f32" => compare!(|a, b| f32_of(a).partial_cmp(&f32_of(b)).is_none_or(|order| order.is_le())),
        "setp.gtu.f32" => compare!(|a, b| f32_of(a).partial_cmp(&f32_of(b)).is_none_or(|order| order.is_gt())),
        "setp.geu.f32" => compare!(|a, b| f32_of(a).partial_cmp(&f32_of(b)).is_none_or(|order| order.is_ge())),
        "setp.num.f32" => compare!(|a, b| !f32_of(a).is_nan() && !f32_of(b).is_nan()),
        "setp.nan.f32" => compare!(|a, b| f32_of(a).is_nan() || f32_of(b).is_nan()),
        "setp.eq.f64" => compare!(|a, b| f64_of(a) == f64_of(b)),
        "setp.lt.f64" => compare!(|a, b| f64_of(a) < f64_of(b)),
        "setp.le.f64" => compare!(|a, b| f64_of(a) <= f64_of(b)),
        "setp.gt.f64" => compare!(|a, b| f64_of(a) > f64_of(b)),
        "setp.ge.f64" => compare!(|a, b| f64_of(a) >= f64_of(b)),
        "setp.neu.f64" => compare!(|a, b| f64_of(a) != f64_of(b)),
        "setp.gtu.f64" => compare!(|a, b| f64_of(a).partial_cmp(&f64_of(b)).is_none_or(|order| order.is_gt())),
        "setp.ltu.f64" => compare!(|a, b| f64_of(a).partial_cmp(&f64_of(b)).is_none_or(|order| order.is_lt())),
        _ => return None,
    })
}
