//! The CPU body of `linear`.

use super::*;

pub(super) fn run(p: &Params, call: &Call<'_>, _: &mut Scratch) -> Result<(), Fault> {
    Linear::reference(p, call)
}
