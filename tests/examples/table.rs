//! The table in `examples/README.md` with the purpose, the readers and the test of each file.

use crate::{read_example, root};
use libtest_mimic::{Completion, Failed};

pub(crate) fn every_example_is_in_the_table() -> Result<Completion, Failed> {
    let readme = read_example("README.md");
    for entry in std::fs::read_dir(root().join("examples"))? {
        let name = entry?.file_name().into_string().unwrap();
        assert!(
            name == "README.md" || readme.contains(&format!("]({name}")),
            "{name} is not in the table"
        );
    }
    for (at, _) in readme.match_indices("](") {
        let target = readme[at + 2..].split([')', '#']).next().unwrap();
        assert!(
            root().join("examples").join(target).exists(),
            "there is no {target}"
        );
    }
    // Each file says what it is for, the values to replace, and how it was tested.
    let ends = [".yaml", ".service", ".conf"];
    for name in ends.into_iter().flat_map(crate::list_examples) {
        let text = read_example(&name);
        let head: String = text
            .lines()
            .take_while(|line| line.starts_with('#'))
            .collect();
        assert!(
            head.contains("Replace") && head.contains("Tested:"),
            "{name}: {head:?}"
        );
    }
    Ok(Completion::Completed)
}
