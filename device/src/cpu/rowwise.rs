//! Bodies that pass over rows: norms, element-wise functions, rotary embedding, sums of rows.
//!
//! Tolerance against the references: sums of squares and means are taken in another order, 2^-20 of their terms; all
//! else is the reference's arithmetic, but for activations (see `simd::activate`).

use super::Scratch;
use super::rows::{self, Row};
use super::simd::{Body, Leaf, Level, Simd, activate};
use crate::io::Tensor;
use crate::kernels::elementwise::Function;
use crate::kernels::linear::Activation;
use crate::kernels::rope;
use core::marker::PhantomData;

/// Row `r` of `tensor`, if there is such a tensor.
fn optional(tensor: &Tensor, r: usize) -> Option<Row> {
    tensor.is_present().then(|| Row::of(tensor, [r, 0], tensor.extent(1)))
}

fn vector(tensor: &Tensor) -> Row {
    Row::of(tensor, [0], tensor.extent(0))
}

/// The sum of f(element) over a row, by four vectors of partial sums. `$v` is the element vector; lanes beyond the row
/// must give zero.
macro_rules! sum_over {
    ($S:ident, $len:expr, |$i:ident, $n:ident| $value:expr) => {{
        let mut sums = [$S::splat(0.0); 4];
        let ($n, mut $i) = ($S::LANES, 0);
        while $i + 4 * $S::LANES <= $len {
            let mut lane = 0;
            while lane < 4 {
                sums[lane] = $S::add(sums[lane], $value);
                $i += $S::LANES;
                lane += 1;
            }
        }
        while $i < $len {
            let $n = $S::LANES.min($len - $i);
            sums[0] = $S::add(sums[0], $value);
            $i += $n;
        }
        $S::sum($S::add($S::add(sums[0], sums[1]), $S::add(sums[2], sums[3])))
    }};
}
pub(super) use sum_over;

/// y = (x * rsqrt(mean(x^2) + eps) * w (+ residual)) * scale.
pub(crate) struct RmsNorm {
    pub(crate) rows: usize,
    pub(crate) eps: f32,
    pub(crate) x: Tensor,
    pub(crate) residual: Tensor,
    pub(crate) w: Tensor,
    pub(crate) scale: f32,
    pub(crate) y: Tensor,
}

impl Body for RmsNorm {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let hidden = self.x.extent(1);
        for r in 0..self.rows {
            let (x, y) = (Row::of(&self.x, [r, 0], hidden), Row::of(&self.y, [r, 0], hidden));
            let (residual, w, eps, of_all) = (optional(&self.residual, r), vector(&self.w), self.eps, self.scale);
            // SAFETY: the level exists (caller); the rows have one length.
            unsafe { L::S::call(RmsNormRow::<L::S> { x, residual, w, y, eps, of_all, set: PhantomData }) };
        }
    }
}

struct RmsNormRow<S> {
    x: Row,
    residual: Option<Row>,
    w: Row,
    y: Row,
    eps: f32,
    of_all: f32,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for RmsNormRow<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let len = self.x.len();
        let same = [self.w.len(), self.y.len(), self.residual.map_or(len, Row::len)];
        assert!(same == [len; 3], "the rows of a norm must have one length");
        // SAFETY: inside the rows; the set exists (caller).
        unsafe {
            let squares = sum_over!(S, len, |i, n| {
                let x = self.x.load::<S>(i, n);
                S::mul(x, x)
            });
            let scale = S::splat(1.0 / (squares / len as f32 + self.eps).sqrt());
            let mut i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                let x = S::mul(self.x.load::<S>(i, n), scale);
                let mut y = S::mul(x, self.w.load::<S>(i, n));
                if let Some(residual) = self.residual {
                    y = S::add(y, residual.load::<S>(i, n));
                }
                self.y.store::<S>(i, n, S::mul(y, S::splat(self.of_all)));
                i += n;
            }
        }
    }
}

/// y = (h - mean(h)) * rsqrt(var(h) + eps) * w + b with h = x (+ residual).
pub(crate) struct LayerNorm {
    pub(crate) rows: usize,
    pub(crate) eps: f32,
    pub(crate) x: Tensor,
    pub(crate) residual: Tensor,
    pub(crate) w: Tensor,
    pub(crate) b: Tensor,
    pub(crate) y: Tensor,
}

impl Body for LayerNorm {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let hidden = self.x.extent(1);
        for r in 0..self.rows {
            let (x, y) = (Row::of(&self.x, [r, 0], hidden), Row::of(&self.y, [r, 0], hidden));
            let (residual, w, b) = (optional(&self.residual, r), vector(&self.w), vector(&self.b));
            // SAFETY: the level exists (caller); the rows have one length.
            unsafe { L::S::call(LayerNormRow::<L::S> { x, residual, w, b, y, eps: self.eps, set: PhantomData }) };
        }
    }
}

struct LayerNormRow<S> {
    x: Row,
    residual: Option<Row>,
    w: Row,
    b: Row,
    y: Row,
    eps: f32,
    set: PhantomData<S>,
}

impl<S: Simd> LayerNormRow<S> {
    /// h.
    #[inline(always)]
    unsafe fn input(&self, i: usize, n: usize) -> S::F {
        // SAFETY: the caller's promises are the same.
        unsafe {
            let x = self.x.load::<S>(i, n);
            // A closure would not be inlined, and the vectors would pass through memory.
            match self.residual {
                Some(residual) => S::add(x, residual.load::<S>(i, n)),
                None => x,
            }
        }
    }
}

impl<S: Simd> Leaf for LayerNormRow<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let len = self.x.len();
        let same = [self.w.len(), self.b.len(), self.y.len(), self.residual.map_or(len, Row::len)];
        assert!(same == [len; 4], "the rows of a norm must have one length");
        // SAFETY: inside the rows; the set exists (caller).
        unsafe {
            let mean = sum_over!(S, len, |i, n| self.input(i, n)) / len as f32;
            let squares = sum_over!(S, len, |i, n| {
                let d = S::sub(self.input(i, n), rows::lanes::<S>(mean, n));
                S::mul(d, d)
            });
            let scale = S::splat(1.0 / (squares / len as f32 + self.eps).sqrt());
            let mut i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                let d = S::mul(S::sub(self.input(i, n), S::splat(mean)), scale);
                let y = S::add(S::mul(d, self.w.load::<S>(i, n)), self.b.load::<S>(i, n));
                self.y.store::<S>(i, n, y);
                i += n;
            }
        }
    }
}

/// y = f(a, b).
pub(crate) struct Elementwise<F> {
    pub(crate) rows: usize,
    pub(crate) function: Function,
    pub(crate) activation: Activation,
    /// What a row is multiplied with, if that is the function.
    pub(crate) factor: F,
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) y: Tensor,
}

impl<F: Fn(usize) -> f32> Body for Elementwise<F> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let n = self.a.extent(1);
        for r in 0..self.rows {
            let (a, y) = (Row::of(&self.a, [r, 0], n), Row::of(&self.y, [r, 0], n));
            let (function, activation) = (self.function, self.activation);
            let (b, factor) = (optional(&self.b, r).unwrap_or(a), (self.factor)(r));
            // SAFETY: the level exists (caller); the rows have one length.
            unsafe { L::S::call(ElementwiseRow::<L::S> { function, activation, factor, a, b, y, set: PhantomData }) };
        }
    }
}

struct ElementwiseRow<S> {
    function: Function,
    activation: Activation,
    factor: f32,
    a: Row,
    b: Row,
    y: Row,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for ElementwiseRow<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let len = self.y.len();
        assert!(self.a.len() == len && self.b.len() == len, "element-wise rows must have one length");
        let mut i = 0;
        while i < len {
            let n = S::LANES.min(len - i);
            // SAFETY: inside the rows; the set exists (caller).
            unsafe {
                let (mut a, b) = (self.a.load::<S>(i, n), self.b.load::<S>(i, n));
                if matches!(self.function, Function::Activate | Function::ActivateMul) {
                    a = activate::<S>(self.activation, a);
                }
                let y = match self.function {
                    Function::Add => S::add(a, b),
                    Function::Mul | Function::ActivateMul => S::mul(a, b),
                    Function::Activate => a,
                    Function::Lengthen => S::mul(a, S::splat(self.factor)),
                };
                self.y.store::<S>(i, n, y);
            }
            i += n;
        }
    }
}

/// y = (a + b + c) * scale, where b and c may be absent. In this order; a lone row is copied with its bits.
pub(crate) struct SumRows {
    pub(crate) a: Row,
    pub(crate) b: Option<Row>,
    pub(crate) c: Option<Row>,
    pub(crate) scale: f32,
    pub(crate) y: Row,
}

impl Body for SumRows {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        // SAFETY: the level exists (caller).
        unsafe { L::S::call(SumOfRows::<L::S>(self, PhantomData)) }
    }
}

struct SumOfRows<S>(SumRows, PhantomData<S>);

impl<S: Simd> Leaf for SumOfRows<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let SumRows { a, b, c, scale, y } = self.0;
        let len = y.len();
        assert!([a.len(), b.map_or(len, Row::len), c.map_or(len, Row::len)] == [len; 3], "rows must have one length");
        let mut i = 0;
        while i < len {
            let n = S::LANES.min(len - i);
            // SAFETY: inside the rows; the set exists (caller).
            unsafe {
                let mut v = a.load::<S>(i, n);
                if let Some(b) = b {
                    v = S::add(v, b.load::<S>(i, n));
                }
                if let Some(c) = c {
                    v = S::add(v, c.load::<S>(i, n));
                }
                if scale != 1.0 {
                    v = S::mul(v, S::splat(scale));
                }
                y.store::<S>(i, n, v);
            }
            i += n;
        }
    }
}

/// The sum of squares of a row.
pub(crate) struct Squares(pub(crate) Row);

impl Body for Squares {
    type Output = f32;
    unsafe fn run<L: Level>(self) -> f32 {
        // SAFETY: the level exists (caller).
        unsafe { L::S::call(SquaresOf::<L::S>(self.0, PhantomData)) }
    }
}

struct SquaresOf<S>(Row, PhantomData<S>);

impl<S: Simd> Leaf for SquaresOf<S> {
    type Output = f32;
    #[inline(always)]
    unsafe fn run(self) -> f32 {
        // SAFETY: inside the row; the set exists (caller).
        unsafe {
            sum_over!(S, self.0.len(), |i, n| {
                let x = self.0.load::<S>(i, n);
                S::mul(x, x)
            })
        }
    }
}

/// Rotary embedding of the heads of one position: see the macro kernel `rope`.
pub(crate) struct Rope<'a> {
    pub(crate) rows: usize,
    /// Position of row 0.
    pub(crate) first: usize,
    pub(crate) params: rope::Params,
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) q_norm: Tensor,
    pub(crate) k_norm: Tensor,
    pub(crate) frequencies: Tensor,
    pub(crate) k_cache: Tensor,
    pub(crate) v_cache: Tensor,
    pub(crate) scratch: &'a mut Scratch,
}

impl Body for Rope<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let (n_kv, group, d) = (self.q.extent(1), self.q.extent(2), self.q.extent(3));
        let (half, turned) = (d / 2, self.params.turned_pairs as usize);
        let [sin, cos, copy] = self.scratch.areas([half, half, d]);
        let norm = |w: &Tensor| w.is_present().then(|| vector(w));
        let (q_norm, k_norm, eps) = (norm(&self.q_norm), norm(&self.k_norm), self.params.eps);
        let is_behind = self.params.norms & rope::TURNED != 0;
        for r in 0..self.rows {
            let pos = self.first + r;
            for i in 0..half {
                let (s, c) = self.params.turn(i, pos as f32 * self.frequencies.get([i]));
                // SAFETY: both areas have `half` elements.
                unsafe { (*sin.add(i), *cos.add(i)) = (s, c) };
            }
            for h in 0..n_kv {
                let turn = |from: Row, norm: Option<Row>, to: Row| {
                    // SAFETY: the level exists (caller); sin and cos are of half the rows' length.
                    unsafe {
                        L::S::call(Turn::<L::S> { from, norm, is_behind, eps, turned, sin, cos, to, set: PhantomData })
                    }
                };
                for g in 0..group {
                    let q = Row::of(&self.q, [r, h, g, 0], d);
                    if turned == half {
                        turn(q, q_norm, q);
                        continue;
                    }
                    // Pairs change places, so they are not turned in place.
                    // SAFETY: the area has `d` elements; the level exists (caller).
                    unsafe {
                        let from = Row::of_floats(copy, d);
                        SumRows { a: q, b: None, c: None, scale: 1.0, y: from }.run::<L>();
                        turn(from, q_norm, q);
                    }
                }
                if !self.k.is_present() {
                    continue;
                }
                turn(Row::of(&self.k, [r, h, 0], d), k_norm, Row::of(&self.k_cache, [h, pos, 0], d));
                let n = self.v.extent(2);
                let (v, y) = (Row::of(&self.v, [r, h, 0], n), Row::of(&self.v_cache, [h, pos, 0], n));
                // SAFETY: the level exists (caller).
                unsafe {
                    let scale = if self.params.norms & rope::VALUES != 0 {
                        L::S::call(NormScale::<L::S>(v, eps, PhantomData))
                    } else {
                        1.0
                    };
                    SumRows { a: v, b: None, c: None, scale, y }.run::<L>();
                }
            }
        }
    }
}

/// What a norm multiplies a row with.
struct NormScale<S>(Row, f32, PhantomData<S>);

impl<S: Simd> Leaf for NormScale<S> {
    type Output = f32;
    #[inline(always)]
    unsafe fn run(self) -> f32 {
        let NormScale(row, eps, _) = self;
        let len = row.len();
        // SAFETY: inside the row; the set exists (caller).
        let squares = unsafe {
            sum_over!(S, len, |i, n| {
                let x = row.load::<S>(i, n);
                S::mul(x, x)
            })
        };
        1.0 / (squares / len as f32 + eps).sqrt()
    }
}

/// `to` = the head `from`, normed, with its pairs turned, as [`rope`](crate::kernels::rope) has them. `to` may be
/// `from` where all are.
struct Turn<S> {
    from: Row,
    norm: Option<Row>,
    /// Whether its weights are multiplied with what is turned.
    is_behind: bool,
    eps: f32,
    turned: usize,
    sin: *const f32,
    cos: *const f32,
    to: Row,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Turn<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let d = self.from.len();
        assert!(self.to.len() == d && self.norm.map_or(d, Row::len) == d, "heads must have one length");
        let half = d / 2;
        // SAFETY: inside the rows and the tables; the set exists (caller).
        unsafe {
            let mut scale = 1.0;
            if self.norm.is_some() {
                let squares = sum_over!(S, d, |i, n| {
                    let x = self.from.load::<S>(i, n);
                    S::mul(x, x)
                });
                scale = 1.0 / (squares / d as f32 + self.eps).sqrt();
            }
            let scale = S::splat(scale);
            let (turned, mut i) = (self.turned, 0);
            while i < half {
                // Pair i, and as many as follow it of those that are turned, or of the others.
                let (end, [low, high]) =
                    if i < turned { (turned, [i, i + turned]) } else { (half, [i + turned, i + half]) };
                let n = S::LANES.min(end - i);
                let (mut a, mut b) = (self.from.load::<S>(low, n), self.from.load::<S>(high, n));
                if self.norm.is_some() {
                    (a, b) = (S::mul(a, scale), S::mul(b, scale));
                }
                let weighed = |[a, b]: [S::F; 2], is_now: bool| match self.norm {
                    Some(norm) if is_now => [S::mul(a, norm.load::<S>(low, n)), S::mul(b, norm.load::<S>(high, n))],
                    _ => [a, b],
                };
                [a, b] = weighed([a, b], !self.is_behind);
                let (sin, cos) = (rows::load::<S>(self.sin.add(i), n), rows::load::<S>(self.cos.add(i), n));
                [a, b] = [S::sub(S::mul(a, cos), S::mul(b, sin)), S::add(S::mul(b, cos), S::mul(a, sin))];
                [a, b] = weighed([a, b], self.is_behind);
                self.to.store::<S>(i, n, a);
                self.to.store::<S>(half + i, n, b);
                i += n;
            }
        }
    }
}

/// The largest element, NaN ignored; -inf when there is none.
pub(crate) struct Largest(pub(crate) Row);

impl Body for Largest {
    type Output = f32;
    unsafe fn run<L: Level>(self) -> f32 {
        // SAFETY: the level exists (caller).
        unsafe { L::S::call(LargestOf::<L::S>(self.0, PhantomData)) }
    }
}

struct LargestOf<S>(Row, PhantomData<S>);

impl<S: Simd> Leaf for LargestOf<S> {
    type Output = f32;
    #[inline(always)]
    unsafe fn run(self) -> f32 {
        let len = self.0.len();
        // SAFETY: inside the row; the set exists (caller).
        unsafe {
            let mut best = [S::splat(f32::NEG_INFINITY); 4];
            let mut i = 0;
            while i + 4 * S::LANES <= len {
                let mut lane = 0;
                while lane < 4 {
                    best[lane] = S::max(self.0.load::<S>(i, S::LANES), best[lane]);
                    i += S::LANES;
                    lane += 1;
                }
            }
            let mut all = S::largest(S::max(S::max(best[0], best[1]), S::max(best[2], best[3])));
            while i < len {
                // One by one: a partial vector's zeros would count.
                let mut one = [0f32; 16];
                S::store(one.as_mut_ptr(), self.0.load::<S>(i, 1));
                all = if one[0] > all { one[0] } else { all };
                i += 1;
            }
            all
        }
    }
}
