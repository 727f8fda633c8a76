//! The verbs of the `perpetua` program, one file each.

pub(crate) mod pack;
pub(crate) mod schedule;
