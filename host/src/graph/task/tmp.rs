#![allow(missing_docs)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerLists { pub lists: Vec<Vec<u32>> }
#[derive(Clone, Debug)]
pub struct Violation;
impl std::fmt::Display for Violation { fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { Ok(()) } }
pub fn check(_: &crate::graph::threadblock::ThreadBlockGraph, _: &super::TaskGraph, _: Option<&WorkerLists>) -> Result<(), Vec<Violation>> { Ok(()) }
