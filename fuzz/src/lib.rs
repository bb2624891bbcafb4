//! Code shared by several fuzz targets.

pub mod yaml;
