// SPDX-License-Identifier: 0BSD
#![doc = include_str!("README.rust.md")]
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "std")]
extern crate std;

mod zcrecord;
pub use self::zcrecord::*;

#[cfg(feature = "std")]
impl std::error::Error for Error {}
