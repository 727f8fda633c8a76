//! stub
pub mod model;
