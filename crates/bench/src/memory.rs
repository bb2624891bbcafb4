//! Memory, as files of /proc tell it.

/// A line such as `Pss:    1500 kB`, in bytes.
pub fn kilobytes(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_ascii_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kilobytes_become_bytes() {
        assert_eq!(
            kilobytes("5581-7ffe [rollup]\nRss:    2000 kB\nPss:    1500 kB\nPss_Dirty: 1 kB\n", "Pss:"),
            Some(1_536_000.0)
        );
        assert_eq!(kilobytes("Rss: 1 kB\n", "Pss:"), None);
    }
}
