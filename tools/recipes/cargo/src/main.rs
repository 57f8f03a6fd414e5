// SPDX-License-Identifier: 0BSD
// Uses the tensor `w` of model.zcr where the program's own bytes are.

mod model {
    include!(concat!(env!("OUT_DIR"), "/model.rs"));
}

fn main() {
    for value in model::W {
        print!("{value} ");
    }
    println!("{:?}", model::W_SHAPE);
}
