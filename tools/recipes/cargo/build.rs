// SPDX-License-Identifier: 0BSD
// Makes model.zcr a module of the program, again whenever it changes. For another archive put its name in the place of
// `model`; for a large one add "--assembly" to the arguments.

use std::{env, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=model.zcr");
    println!("cargo:rerun-if-env-changed=ZCRECORD");
    let folder = env::var("OUT_DIR").expect("cargo sets it");
    let zcrecord = env::var("ZCRECORD").unwrap_or_else(|_| "zcrecord".to_owned());
    let mut words = zcrecord.split_whitespace();
    let status = Command::new(words.next().expect("ZCRECORD is a command"))
        .args(words)
        .args(["embed", "model.zcr", "--lang", "rust", "--output", &folder, "--quiet"])
        .status()
        .expect("zcrecord is there: pip install it from its checkout");
    assert!(status.success(), "zcrecord embed failed, see above");
}
