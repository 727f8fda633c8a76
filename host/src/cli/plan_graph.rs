//! stub until merged
pub(crate) fn run(_: &std::path::Path, _: u32, _: Option<&std::path::Path>, _: Option<&std::path::Path>, _: Option<&std::path::Path>, _: bool) -> super::Outcome { Err("not merged".into()) }
