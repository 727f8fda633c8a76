//! stub
pub mod device_image;
