//! The page of a report: what is in it, and how a browser shows it.

mod browser;
mod fixture;
mod made;
mod page;
mod shown;
