//! The page of a report: what is in it, and how a browser shows it.
#![cfg(feature = "rehearse")]

#[path = "report/browser.rs"]
mod browser;
#[path = "report/fixture.rs"]
mod fixture;
#[path = "report/made.rs"]
mod made;
#[path = "report/page.rs"]
mod page;
#[path = "report/shown.rs"]
mod shown;
