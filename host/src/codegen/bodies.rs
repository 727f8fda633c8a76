//! The library's bodies, and the files that are generated from them.

use super::*;

/// A file of the device crate.
#[derive(Debug)]
pub struct File {
    /// Its path, from the repository's root.
    pub path: &'static str,
    /// What its bodies are, as its documentation.
    pub doc: &'static str,
    /// The function here that makes them.
    pub from: &'static str,
    /// They.
    pub bodies: Vec<Body>,
}

/// All of them.
pub fn files() -> Vec<File> {
    vec![File {
        path: "device/src/kernels/attention/flash.rs",
        doc: "Attention of many rows of queries on the tensor cores, keys and values by blocks (Dao et al. 2022).",
        from: "flash_attention",
        // Sums of 128 dimensions leave registers for half as many scores.
        bodies: vec![flash_attention(64, 64), flash_attention(128, 32)],
    }]
}

/// `y = softmax(scale * q . k^T) . v` of up to `d` dimensions, `positions` keys and values at a time, with exponentials of 2. A row's
/// running maximum and total are corrected as blocks come (Milakov and Gimelshein 2018).
pub fn flash_attention(d: u32, positions: u32) -> Body {
    let doc = format!(
        "y = softmax(scale * q . k^T) . v, base 2, of up to {d} columns, over the positions that each row sees."
    );
    let (mut body, [q, k, v, y]) = Body::new(&format!("attend_{d}"), &doc, ["q", "k", "v", "y"]);
    let scale = body.scalar("scale");
    let queries = body.tile("queries", Place::Own { columns: d });
    let keys = body.tile("keys", Place::Shared { rows: positions, columns: d, stages: 2 });
    let values = body.tile("values", Place::Shared { rows: positions, columns: d, stages: 2 });
    let scores = body.tile("scores", Place::Eights { columns: positions });
    let sums = body.tile("sums", Place::Sixteens { columns: d });
    let [max, total, found, new, factor] =
        ["max", "total", "found", "new", "factor"].map(|name| body.tile(name, Place::PerRow));

    body.op(Op::Split { to: queries, from: q, column: None });
    body.op(Op::Fill { to: sums, value: 0.0 });
    body.op(Op::Fill { to: max, value: f32::NEG_INFINITY });
    body.op(Op::Fill { to: total, value: 0.0 });
    body.each("t", positions, Extent::Seen, |body, t| {
        body.op(Op::Load { to: keys, from: k, row: Some(t), column: None });
        body.op(Op::Load { to: values, from: v, row: Some(t), column: None });
        body.op(Op::Fill { to: scores, value: 0.0 });
        body.op(Op::Product { into: scores, a: queries, b: keys, by: By::Rows });
        body.op(Op::Map { to: scores, expr: Expr::Visible(t, Box::new(of(scores) * scale)) });
        body.op(Op::Reduce { to: found, of: scores, by: Reduction::Max });
        body.op(Op::Map { to: new, expr: larger(of(max), of(found)) });
        body.op(Op::Map { to: factor, expr: exp2(of(max) - of(new)) });
        body.op(Op::Map { to: scores, expr: exp2(of(scores) - of(new)) });
        body.op(Op::Reduce { to: found, of: scores, by: Reduction::Sum });
        body.op(Op::Map { to: total, expr: of(total) * of(factor) + of(found) });
        body.op(Op::Map { to: sums, expr: of(sums) * of(factor) });
        body.op(Op::Product { into: sums, a: scores, b: values, by: By::Columns });
        body.op(Op::Map { to: max, expr: of(new) });
    });
    body.op(Op::Map { to: factor, expr: reciprocal(of(total)) });
    body.op(Op::Map { to: sums, expr: of(sums) * of(factor) });
    body.op(Op::Keep { to: queries, from: sums });
    body.op(Op::Write { to: y, from: queries, column: None });
    body
}
