//! The library's bodies, and the files that are generated from them.

use super::*;
use perpetua_device::kernels::attention::FOUND;
use std::f32::consts::{LN_2, LOG2_E};

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
    vec![
        File {
            path: "device/src/kernels/attention/flash.rs",
            doc: "Attention of many rows of queries on the tensor cores, keys and values by blocks (Dao et al. 2022).",
            from: "{flash_attention, flash_attention_share}",
            // Sums of 128 dimensions leave registers for half as many scores.
            bodies: vec![
                flash_attention(64, 64),
                flash_attention(128, 32),
                flash_attention_share(64, 64),
                flash_attention_share(128, 32),
            ],
        },
        File {
            path: "device/src/gpu/bodies/products.rs",
            doc: "Products with what comes before or after them.",
            from: "{back_to_back, normed_linear, gated_mlp}",
            bodies: vec![back_to_back(), normed_linear(), gated_mlp()],
        },
        File {
            path: "device/src/gpu/bodies/attention.rs",
            doc: "Attention whose positions several blocks share, in a cache of pages, and what merges their shares (flash-decoding).",
            from: "{attend_share, merge}",
            bodies: vec![attend_share(64, 64), attend_share(128, 32), merge(64), merge(128)],
        },
        File {
            path: "device/src/gpu/bodies/rows.rs",
            doc: "Rows to and from where an index says.",
            from: "{gather, scatter}",
            bodies: vec![gather(), scatter()],
        },
    ]
}

/// `y = softmax(scale * q . k^T, sink) . v` of up to `d` dimensions, `positions` keys and values at a time, with
/// exponentials of 2. A row's sink is a score of no value, in powers of 2, too.
pub fn flash_attention(d: u32, positions: u32) -> Body {
    let doc = format!(
        "y = softmax(scale * q . k^T) . v, base 2, of up to {d} columns, over the positions that each row sees, and a score without value."
    );
    let (mut body, [q, k, v, y]) = Body::new(&format!("attend_{d}"), &doc, ["q", "k", "v", "y"]);
    let queries = body.tile("queries", Place::Own { columns: d });
    let found = attend(&mut body, queries, positions, [q, k, v], Extent::Seen(k));
    let [_, shrink] = with_sinks(&mut body, &found);
    let Found { sums, total, .. } = found;
    let inverse = body.tile("inverse", Place::PerRow);
    body.op(Op::Map { to: inverse, expr: of(shrink) * reciprocal(of(total)) });
    body.op(Op::Map { to: sums, expr: of(sums) * of(inverse) });
    body.op(Op::Keep { to: queries, from: sums });
    body.op(Op::Write { to: y, from: queries, column: Start::FIRST, update: Update::Set });
    body
}

/// What a share of the positions adds up to, for the macro kernel `attention_merge`: in each row of `found` the largest
/// score, in powers of e as all are there, the total, two columns that are nobody's, and the sums.
pub fn flash_attention_share(d: u32, positions: u32) -> Body {
    let doc = format!(
        "found = max, total, and sums of exp2(scale * q . k^T - max) . v, of up to {d} columns, over a share of the positions that each row sees, and a score without value."
    );
    let (mut body, [q, k, v, found]) = Body::new(&format!("attend_share_{d}"), &doc, ["q", "k", "v", "found"]);
    let queries = body.tile("queries", Place::Own { columns: d });
    let made = attend(&mut body, queries, positions, [q, k, v], Extent::Share);
    let [all, shrink] = with_sinks(&mut body, &made);
    let Found { sums, max, total } = made;
    body.op(Op::Map { to: sums, expr: of(sums) * of(shrink) });
    body.op(Op::Map { to: max, expr: of(all) * Expr::Constant(LN_2) });
    body.op(Op::Keep { to: queries, from: sums });
    body.op(Op::Write { to: found, from: queries, column: Start::FIRST.plus(FOUND), update: Update::Set });
    for (from, column) in [(max, 0), (total, 1)] {
        body.op(Op::Write { to: found, from, column: Start::FIRST.plus(column), update: Update::Set });
    }
    body
}

/// What a share of the positions adds up to, for [`merge`]: in each row of `found` `d` sums, their largest score and
/// their total. `k` and `v` are caches of pages: position t lies in row `pages(t)`.
pub fn attend_share(d: u32, positions: u32) -> Body {
    let doc = format!(
        "found = sums of exp2(scale * q . k^T - max) . v, max, total, of {d} columns, over a share of the positions that each row sees."
    );
    let (mut body, [q, k, v, found]) = Body::new(&format!("attend_share_{d}"), &doc, ["q", "k", "v", "found"]);
    let [k, v] = [k, v].map(|cache| body.through(cache, "pages"));
    let queries = body.tile("queries", Place::Own { columns: d });
    let Found { sums, max, total } = attend(&mut body, queries, positions, [q, k, v], Extent::Share);
    body.op(Op::Keep { to: queries, from: sums });
    body.op(Op::Write { to: found, from: queries, column: Start::FIRST, update: Update::Set });
    for (from, column) in [(max, d), (total, d + 1)] {
        body.op(Op::Write { to: found, from, column: Start::FIRST.plus(column), update: Update::Set });
    }
    body
}

/// The tiles that [`attend`] leaves.
struct Found {
    sums: TileId,
    max: TileId,
    total: TileId,
}

/// A largest score of positions of which a row sees none. Less than all scores, and a number: differences of it are,
/// too.
const NOTHING: f32 = -1e30;

/// Attends to positions up to `end`. A row's running maximum and total are corrected as blocks come (Milakov and
/// Gimelshein 2018).
fn attend(body: &mut Body, queries: TileId, positions: u32, [q, k, v]: [GlobalId; 3], end: Extent) -> Found {
    let Place::Own { columns: d } = body.tiles[queries.0].place else { unreachable!("queries are a warp's own") };
    let scale = body.scalar("scale");
    let keys = body.tile("keys", Place::Shared { rows: positions, columns: d, stages: 2 });
    let values = body.tile("values", Place::Shared { rows: positions, columns: d, stages: 2 });
    let scores = body.tile("scores", Place::Eights { columns: positions });
    let sums = body.tile("sums", Place::Sixteens { columns: d });
    let [max, total, of_block, new, factor] =
        ["max", "total", "of_block", "new", "factor"].map(|name| body.tile(name, Place::PerRow));
    body.op(Op::Split { to: queries, from: q, column: Start::FIRST });
    body.op(Op::Fill { to: sums, value: 0.0 });
    body.op(Op::Fill { to: max, value: NOTHING });
    body.op(Op::Fill { to: total, value: 0.0 });
    body.each("t", positions, end, |body, t| {
        body.op(Op::Load { to: keys, from: k, row: Start::at(t), column: Start::FIRST });
        body.op(Op::Load { to: values, from: v, row: Start::at(t), column: Start::FIRST });
        body.op(Op::Fill { to: scores, value: 0.0 });
        body.op(Op::Product { into: scores, a: queries, b: keys, by: By::Rows });
        body.op(Op::Map { to: scores, expr: Expr::Visible(t, Box::new(of(scores) * scale)) });
        body.op(Op::Reduce { to: of_block, of: scores, by: Reduction::Max });
        body.op(Op::Map { to: new, expr: larger(of(max), of(of_block)) });
        body.op(Op::Map { to: factor, expr: exp2(of(max) - of(new)) });
        body.op(Op::Map { to: scores, expr: exp2(of(scores) - of(new)) });
        body.op(Op::Reduce { to: of_block, of: scores, by: Reduction::Sum });
        body.op(Op::Map { to: total, expr: of(total) * of(factor) + of(of_block) });
        body.op(Op::Map { to: sums, expr: of(sums) * of(factor) });
        body.op(Op::Product { into: sums, a: scores, b: values, by: By::Columns });
        body.op(Op::Map { to: max, expr: of(new) });
    });
    Found { sums, max, total }
}

/// Makes each row's sink one of its scores, of which a row without one has -inf, which changes nothing: the total is
/// with it, and returned are the maximum and what the sums are yet to be multiplied with.
fn with_sinks(body: &mut Body, found: &Found) -> [TileId; 2] {
    let Found { max, total, .. } = *found;
    let [sink, all, shrink] = ["sink", "all", "shrink"].map(|name| body.tile(name, Place::PerRow));
    body.ask("sinks", sink);
    body.op(Op::Map { to: all, expr: larger(of(max), of(sink)) });
    body.op(Op::Map { to: shrink, expr: exp2(of(max) - of(all)) });
    body.op(Op::Map { to: total, expr: of(total) * of(shrink) + exp2(of(sink) - of(all)) });
    [all, shrink]
}

/// `y = ` what shares of the positions found together, each in `d + 8` columns of `found`, as [`attend_share`] left
/// them in the first `d + 2`.
pub fn merge(d: u32) -> Body {
    let doc = format!("y = what shares of the positions found together, {} columns of `found` each.", d + 8);
    let (mut body, [found, y]) = Body::new(&format!("merge_{d}"), &doc, ["found", "y"]);
    let kept = body.tile("kept", Place::Own { columns: d });
    let [sums, part] = ["sums", "part"].map(|name| body.tile(name, Place::Eights { columns: d }));
    let [max, total, of_part, new, old, factor] =
        ["max", "total", "of_part", "new", "old", "factor"].map(|name| body.tile(name, Place::PerRow));

    body.op(Op::Fill { to: sums, value: 0.0 });
    body.op(Op::Fill { to: max, value: NOTHING });
    body.op(Op::Fill { to: total, value: 0.0 });
    body.each("n", d + 8, Extent::Columns(found), |body, n| {
        let read = |to, plus| Op::Read { to, from: found, rows: Whose::Own, column: Start::at(n).plus(plus) };
        body.op(read(part, 0));
        body.op(read(of_part, d));
        body.op(Op::Map { to: new, expr: larger(of(max), of(of_part)) });
        body.op(Op::Map { to: old, expr: exp2(of(max) - of(new)) });
        body.op(Op::Map { to: factor, expr: exp2(of(of_part) - of(new)) });
        body.op(Op::Map { to: sums, expr: of(sums) * of(old) + of(part) * of(factor) });
        body.op(read(of_part, d + 1));
        body.op(Op::Map { to: total, expr: of(total) * of(old) + of(of_part) * of(factor) });
        body.op(Op::Map { to: max, expr: of(new) });
    });
    body.op(Op::Map { to: factor, expr: reciprocal(of(total)) });
    body.op(Op::Map { to: sums, expr: of(sums) * of(factor) });
    body.op(Op::Keep { to: kept, from: sums });
    body.op(Op::Write { to: y, from: kept, column: Start::FIRST, update: Update::Set });
    body
}

/// Columns of a product's operands at a time.
const STEP: u32 = 64;

/// A right operand of a product, [`STEP`] of its rows by as many columns, that is loaded ahead.
fn ahead(body: &mut Body, name: &str) -> TileId {
    body.tile(name, Place::Shared { rows: STEP, columns: STEP, stages: 3 })
}

/// `y = (x . a^T) . b` of up to 128 columns: what is between the products never leaves registers.
pub fn back_to_back() -> Body {
    let (mut body, [x, a, b, y]) =
        Body::new("back_to_back", "y = (x . a^T) . b, of up to 128 columns.", ["x", "a", "b", "y"]);
    let first = ahead(&mut body, "first");
    let second = body.tile("second", Place::Shared { rows: STEP, columns: 128, stages: 2 });
    let kept = body.tile("kept", Place::Own { columns: 128 });
    let [rows, between] = ["rows", "between"].map(|name| body.tile(name, Place::Eights { columns: STEP }));
    let sums = body.tile("sums", Place::Sixteens { columns: 128 });

    body.op(Op::Fill { to: sums, value: 0.0 });
    body.each("n", STEP, Extent::Rows(a), |body, n| {
        body.op(Op::Load { to: second, from: b, row: Start::at(n), column: Start::FIRST });
        body.op(Op::Fill { to: between, value: 0.0 });
        body.each("k", STEP, Extent::Columns(x), |body, k| {
            body.op(Op::Load { to: first, from: a, row: Start::at(n), column: Start::at(k) });
            body.op(Op::Read { to: rows, from: x, rows: Whose::Own, column: Start::at(k) });
            body.op(Op::Product { into: between, a: rows, b: first, by: By::Rows });
        });
        body.op(Op::Product { into: sums, a: between, b: second, by: By::Columns });
    });
    body.op(Op::Keep { to: kept, from: sums });
    body.op(Op::Write { to: y, from: kept, column: Start::FIRST, update: Update::Set });
    body
}

/// `y = rms_norm(x) . w^T`: `g` are the norm's weights, a row. What norms a row is found first, and multiplies the
/// sums.
pub fn normed_linear() -> Body {
    let doc = "y = (x / rms(x) * g) . w^T; `mean` is 1 over the columns.";
    let (mut body, [x, g, w, y]) = Body::new("normed_linear", doc, ["x", "g", "w", "y"]);
    let [mean, eps] = ["mean", "eps"].map(|name| body.scalar(name));
    let weights = ahead(&mut body, "weights");
    let kept = body.tile("kept", Place::Own { columns: STEP });
    let [rows, gains, squares, sums] =
        ["rows", "gains", "squares", "sums"].map(|name| body.tile(name, Place::Eights { columns: STEP }));
    let factor = body.tile("factor", Place::PerRow);

    body.op(Op::Fill { to: squares, value: 0.0 });
    body.each("i", STEP, Extent::Columns(x), |body, i| {
        body.op(Op::Read { to: rows, from: x, rows: Whose::Own, column: Start::at(i) });
        body.op(Op::Map { to: squares, expr: of(squares) + of(rows) * of(rows) });
    });
    body.op(Op::Reduce { to: factor, of: squares, by: Reduction::Sum });
    body.op(Op::Map { to: factor, expr: reciprocal_root(of(factor) * mean + eps) });
    body.each("n", STEP, Extent::Rows(w), |body, n| {
        body.op(Op::Fill { to: sums, value: 0.0 });
        body.each("k", STEP, Extent::Columns(x), |body, k| {
            body.op(Op::Load { to: weights, from: w, row: Start::at(n), column: Start::at(k) });
            body.op(Op::Read { to: rows, from: x, rows: Whose::Own, column: Start::at(k) });
            body.op(Op::Read { to: gains, from: g, rows: Whose::First, column: Start::at(k) });
            body.op(Op::Map { to: rows, expr: of(rows) * of(gains) });
            body.op(Op::Product { into: sums, a: rows, b: weights, by: By::Rows });
        });
        body.op(Op::Map { to: sums, expr: of(sums) * of(factor) });
        body.op(Op::Keep { to: kept, from: sums });
        body.op(Op::Write { to: y, from: kept, column: Start::at(n), update: Update::Set });
    });
    body
}

/// `y += (silu(x . gate^T) * (x . up^T)) . down^T`, of as many columns between as the block has rows of `gate`: a task
/// of a split product.
pub fn gated_mlp() -> Body {
    let doc = "y += (silu(x . gate^T) * (x . up^T)) . down^T.";
    let (mut body, [x, gate, up, down, y]) = Body::new("gated_mlp", doc, ["x", "gate", "up", "down", "y"]);
    let [gates, ups, downs] = ["gates", "ups", "downs"].map(|name| ahead(&mut body, name));
    let kept = body.tile("kept", Place::Own { columns: STEP });
    let [rows, opens, values, part] =
        ["rows", "opens", "values", "part"].map(|name| body.tile(name, Place::Eights { columns: STEP }));

    body.each("i", STEP, Extent::Rows(gate), |body, i| {
        [opens, values].iter().for_each(|sums| body.op(Op::Fill { to: *sums, value: 0.0 }));
        body.each("k", STEP, Extent::Columns(x), |body, k| {
            body.op(Op::Load { to: gates, from: gate, row: Start::at(i), column: Start::at(k) });
            body.op(Op::Load { to: ups, from: up, row: Start::at(i), column: Start::at(k) });
            body.op(Op::Read { to: rows, from: x, rows: Whose::Own, column: Start::at(k) });
            body.op(Op::Product { into: opens, a: rows, b: gates, by: By::Rows });
            body.op(Op::Product { into: values, a: rows, b: ups, by: By::Rows });
        });
        let sigmoid = reciprocal(Expr::Constant(1.0) + exp2(of(opens) * Expr::Constant(-LOG2_E)));
        body.op(Op::Map { to: opens, expr: of(opens) * sigmoid });
        body.op(Op::Map { to: values, expr: of(opens) * of(values) });
        body.each("n", STEP, Extent::Rows(down), |body, n| {
            body.op(Op::Load { to: downs, from: down, row: Start::at(n), column: Start::at(i) });
            body.op(Op::Fill { to: part, value: 0.0 });
            body.op(Op::Product { into: part, a: values, b: downs, by: By::Rows });
            body.op(Op::Keep { to: kept, from: part });
            body.op(Op::Write { to: y, from: kept, column: Start::at(n), update: Update::Add });
        });
    });
    body
}

/// Row i of `y` is row `ids(i)` of `table`.
pub fn gather() -> Body {
    let doc = "y[i, :] = table[ids(i), :].";
    let (mut body, [table, y]) = Body::new("gather", doc, ["table", "y"]);
    let rows = body.through(table, "ids");
    moved(&mut body, rows, y);
    body
}

/// Row `slots(i)` of `y`, a cache of pages, is row i of `x`.
pub fn scatter() -> Body {
    let doc = "y[slots(i), :] = x[i, :].";
    let (mut body, [x, y]) = Body::new("scatter", doc, ["x", "y"]);
    body.rows = body.through(y, "slots");
    let to = body.rows;
    moved(&mut body, x, to);
    body
}

fn moved(body: &mut Body, from: GlobalId, to: GlobalId) {
    let kept = body.tile("kept", Place::Own { columns: STEP });
    let rows = body.tile("rows", Place::Eights { columns: STEP });
    body.each("c", STEP, Extent::Columns(to), |body, c| {
        body.op(Op::Read { to: rows, from, rows: Whose::Own, column: Start::at(c) });
        body.op(Op::Keep { to: kept, from: rows });
        body.op(Op::Write { to, from: kept, column: Start::at(c), update: Update::Set });
    });
}
