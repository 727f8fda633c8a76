//! The CPU body of `attention`.

use super::*;

pub(super) fn run(p: &Params, call: &Call<'_>, _: &mut Scratch) -> Result<(), Fault> {
    Attention::reference(p, call)
}
