//! Formats numbers for people, with units and separators between thousands. Escapes text for HTML.

/// Formats a number with separators between thousands.
pub fn format_count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number with its noun: `1 watch`, `2,000 watches`. `many` is the plural.
pub(crate) fn format_count_with_noun(number: u64, one: &str, many: &str) -> String {
    format!(
        "{} {}",
        format_count(number),
        if number == 1 { one } else { many }
    )
}

/// Formats a duration, with three significant digits.
pub fn format_wait_time(ms: f64) -> String {
    match ms {
        ms if !ms.is_finite() => "unknown".to_owned(),
        ..0.01 => "0 ms".to_owned(),
        ..1.0 => format!("{ms:.2} ms"),
        ..10.0 => format!("{ms:.1} ms"),
        ..1_000.0 => format!("{ms:.0} ms"),
        ..100_000.0 => format!("{:.1} s", ms / 1e3),
        _ => format!("{} s", format_count((ms / 1e3) as u64)),
    }
}

/// Formats a time in seconds from the start of the load.
pub(crate) fn format_moment(ms: i64) -> String {
    let sign = if ms < 0 { "−" } else { "" };
    let ms = ms.unsigned_abs();
    format!("{sign}{}.{:02} s", format_count(ms / 1000), ms % 1000 / 10)
}

/// Formats a size of memory.
pub fn format_bytes(bytes: u64) -> String {
    let gib = bytes as f64 / f64::from(1 << 30);
    if gib < 1.0 {
        format!("{:.0} MiB", gib * 1024.0)
    } else {
        format!("{gib:.1} GiB")
    }
}

/// Capitalizes the first letter, for headings and rows of a page.
pub(crate) fn capitalize(words: &str) -> String {
    let mut letters = words.chars();
    letters
        .next()
        .map(|first| first.to_uppercase().chain(letters).collect())
        .unwrap_or_default()
}

/// Escapes text for an HTML element or a quoted attribute.
pub(crate) fn escape_html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_have_a_unit() {
        let texts = [
            0.0,
            0.123,
            4.56,
            38.2,
            999.4,
            4_100.0,
            1_234_567.0,
            f64::NAN,
        ]
        .map(format_wait_time);
        assert_eq!(
            texts,
            [
                "0 ms", "0.12 ms", "4.6 ms", "38 ms", "999 ms", "4.1 s", "1,234 s", "unknown"
            ]
        );
    }

    #[test]
    fn moments_sizes_and_counts_are_formatted() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567].map(format_count),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            [-1_250, 0, 61_007].map(format_moment),
            ["−1.25 s", "0.00 s", "61.00 s"]
        );
        assert_eq!(
            [512 << 20, 16 << 30].map(format_bytes),
            ["512 MiB", "16.0 GiB"]
        );
        assert_eq!(
            format_count_with_noun(1, "watch", "watches")
                + " "
                + &format_count_with_noun(2_000, "watch", "watches"),
            "1 watch 2,000 watches"
        );
    }
}
