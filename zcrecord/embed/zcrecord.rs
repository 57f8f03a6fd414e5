// SPDX-License-Identifier: 0BSD
//! A reader of zcrecord archives: one file without dependencies, allocation, unsafe code or panics.
//!
//! Knows what FORMAT.md says of version 1; rule numbers (R1, ...) are those of that page. Copies no payload byte: what
//! comes out borrows the bytes it was opened on. It needs `core` alone, any `usize` from 16 bits on, either byte order,
//! rustc 1.63 and edition 2018. Put it beside your sources and say `mod zcrecord;`.
//!
//! ```text
//! let archive = zcrecord::Archive::open(bytes)?;       // the [open] rules: headers, extents, where the vectors lie
//! archive.verify(&mut scratch)?;                       // for strangers' bytes: every rule of the index, and its CRC
//! let tensor = archive.get("encoder.0.weight")?;       // binary search, and the rules of this tensor
//! for x in tensor.values::<f32>()? { sum += x; }       // reads through strides, at any address
//! let bytes: &[u8] = tensor.bytes()?;                  // C order, or Error::Strided
//! ```
//!
//! [`Error`] is no `std::error::Error` by itself, since `core` has that trait from rustc 1.81 on alone. Your crate may
//! say that it is one, as this file is a module of it:
//!
//! ```text
//! impl std::error::Error for zcrecord::Error {}        // core::error::Error without std
//! ```
//!
//! Archives that were not verified are safe to read all the same: each entry is checked when it is touched, and what is
//! wrong comes out as an [`Error`]; only sums over the whole (unique names, every payload used) are not known then.
//!
//! Where the archive lies on a multiple of [`Archive::base_alignment`], [`Tensor::bytes`] are aligned for any use, and
//! `bytemuck::cast_slice(tensor.bytes()?)` is a `&[f32]` without a copy. `include_bytes!` alone aligns to 1; this does:
//!
//! ```text
//! #[repr(C, align(64))]
//! struct Aligned<T: ?Sized>(T);
//! static MODEL: &Aligned<[u8]> = &Aligned(*include_bytes!("model.zcr"));
//! ```
//!
//! Who knows the model when compiling needs no reader: `zcrecord embed --lang rust` writes each tensor as a static,
//! such as `ENCODER_0_WEIGHT: &[[f32; 128]; 64]`.
#![forbid(unsafe_code)]
#![allow(dead_code)] // as a private module, whatever its program does not call
#![allow(unknown_lints, clippy::manual_is_multiple_of, clippy::unnecessary_map_or)] // their advice needs rustc 1.87

use core::cmp::Ordering;
use core::convert::{TryFrom, TryInto}; // edition 2018
use core::fmt;
use core::marker::PhantomData;
use core::str;

const MAGIC: [u8; 8] = [0x89, 0x5A, 0x43, 0x52, 0x0D, 0x0A, 0x1A, 0x0A];
const VERSION: u8 = 1;
const NONE: u32 = 0xFFFF_FFFF;
const HEADER: u64 = 64;
const MAX_SIZE: u64 = 1 << 56;
const MAX_RANK: u8 = 64;
const MAX_DEPTH: u32 = 100;
const INDEX_ALLOWANCE: u64 = 16;
const PAYLOAD: u64 = 24; // bytes of each struct
const TENSOR: u64 = 48;
const MODULE: u64 = 48;
const ATTRIBUTE: u64 = 32;
const STRING: u8 = DType::STRING.0;
const TEXT: u8 = 5; // types of values
const BYTES: u8 = 6;

macro_rules! errors {
    ($($name:ident $rule:literal $what:literal,)*) => {
        /// What is wrong. One byte; [`Error::rule`] gives the number of the rule in FORMAT.md that is broken.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Error {
            $(#[doc = $what] $name,)*
        }

        impl Error {
            /// The number of the broken rule, 0 where the bytes are not at fault.
            pub const fn rule(self) -> u8 {
                match self {
                    $(Error::$name => $rule,)*
                }
            }

            /// What is wrong, in a few words.
            pub const fn what(self) -> &'static str {
                match self {
                    $(Error::$name => $what,)*
                }
            }
        }
    };
}

errors! {
    NotFound 0 "there is none of that name or number",
    Strided 0 "its elements do not lie in C order; read them by values() or element()",
    WrongType 0 "its elements are of another type",
    ScratchTooSmall 0 "more scratch words are needed; see scratch_words() and child_count()",
    TooShort 1 "too few bytes for an archive; the source is truncated",
    Magic 1 "the magic is missing; this is no archive, or damaged at this end",
    Version 2 "a later format version, or the draft, version 0, of which `zcrecord convert` makes version 1",
    HeaderCrc 3 "the CRC of header or trailer does not match; the archive is damaged",
    Alignment 4 "the alignment is outside 2^4 to 2^16",
    BaseAlignment 5 "the base alignment is outside the alignment to 2^16",
    HeaderReserved 6 "reserved bytes of the header are not zero",
    Features 7 "it needs features this reader does not know",
    HeadersDiffer 8 "header and trailer differ; the archive is damaged",
    ArchiveSize 9 "archive_size is not the size of the source; it is truncated, or followed by other bytes",
    IndexSize 10 "index_size is not a multiple of 8 from 8 to 2^31 - 8",
    PayloadOffset 11 "payload_offset is unaligned, or past the end",
    IndexOffset 12 "header, index, payloads and trailer do not tile the archive",
    PayloadEnd 13 "the payloads do not end where their region does",
    Unsealed 15 "the header is not sealed, so the size is not known",
    Suffix 16 "no archive ends here",
    IndexCrc 17 "the CRC of the index does not match; the archive is damaged",
    Identifier 19 "the index is no FlatBuffer of ours",
    Vtable 20 "the vtable of the index leaves it",
    Field 21 "a field of the index lies outside its table",
    Vector 22 "a vector of the index is unaligned, or leaves it",
    VectorLength 24 "by_name or by_module has not one item for each tensor",
    DigestKind 25 "an unknown kind of digest",
    Reserved 26 "a reserved field is not zero",
    Span 27 "a span leaves the text pool, or is not followed by NUL",
    Utf8 28 "text is not UTF-8",
    Name 29 "a name is empty, or holds NUL",
    Budget 30 "names, texts and lists repeat too much of their pools",
    NameOrder 32 "by_name is no permutation in which names ascend",
    KeySize 33 "a key is empty, or longer than its name",
    FullName 34 "a full name is not its module's name, a dot and the key",
    ModuleTwice 35 "two modules have one name",
    KeyTwice 36 "two children of a module have one key",
    Root 37 "module 0 is missing, or not the whole record",
    ModuleRange 38 "a module lies outside its parent",
    ModuleOrder 39 "modules are not in pre-order",
    Depth 40 "modules are nested more than 100 deep",
    ModuleKind 41 "module kind 0",
    ModuleTensors 42 "by_module does not ascend by parent and number",
    FirstChild 43 "first_tensor or first_attribute is wrong",
    Places 44 "the places of a module's children are not 0, 1, 2, ... once each",
    Parent 45 "the parent is no module",
    ElementType 46 "the dtype cannot take so many bits an element",
    Rank 47 "the rank is more than 64",
    Dims 48 "the dims leave their pool",
    Shape 49 "a shape claims more than 2^56 bytes",
    PayloadNumber 50 "a payload is missing, not in the index, or there for no bytes",
    PayloadSize 51 "the payload's size is not that of the shape",
    Strides 52 "strides leave their pool, or the type can have none",
    Reach 53 "strides reach outside the payload",
    ByteOffset 54 "byte_offset is no multiple of the element's size",
    ViewSize 55 "a view claims more bytes than its payload has",
    PayloadRange 56 "a payload is empty, or leaves the region of payloads",
    PayloadAlignment 57 "a payload is not aligned",
    PayloadOverlap 58 "payloads overlap, or are out of order",
    PayloadHole 59 "a hole of the base alignment or more before a payload",
    PayloadDigest 60 "one range with two digests, or a digest in an archive without",
    PayloadUnused 61 "a payload that nothing uses",
    AttributeOrder 64 "attributes do not ascend by parent and place",
    MetadataOrder 65 "metadata has a parent or place, or names that do not ascend",
    ValueType 66 "an unknown type or form of value",
    List 67 "a list leaves its pool",
    Value 68 "a value that its type does not have",
    PadBits 70 "the bits after the last element are not zero",
    Strings 71 "the ends of strings do not ascend inside their bytes",
    Bool 72 "a bool is neither 0 nor 1",
    Digest 73 "a payload's digest does not match; the archive is damaged",
    Gap 74 "bytes between the payloads are not zero",
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rule() {
            0 => f.write_str(self.what()),
            rule => write!(f, "R{}: {}", rule, self.what()),
        }
    }
}

// Bytes. Whatever indexes a slice goes through `part`, so nothing here can panic, whatever the numbers are.

fn part(bytes: &[u8], start: u64, size: u64) -> Option<&[u8]> {
    let (start, size) = (usize::try_from(start).ok()?, usize::try_from(size).ok()?);
    bytes.get(start..)?.get(..size)
}

fn take<const N: usize>(bytes: &[u8], start: u64) -> Option<&[u8; N]> {
    part(bytes, start, N as u64)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: u64) -> Option<u16> {
    take(bytes, at).map(|b| u16::from_le_bytes(*b))
}

fn u32_at(bytes: &[u8], at: u64) -> Option<u32> {
    take(bytes, at).map(|b| u32::from_le_bytes(*b))
}

fn u64_at(bytes: &[u8], at: u64) -> Option<u64> {
    take(bytes, at).map(|b| u64::from_le_bytes(*b))
}

/// A field of a struct: `at` is known when compiling, so the 0 for "outside" costs nothing and never comes about.
#[inline(always)]
fn field32(row: &[u8], at: u64) -> u32 {
    u32_at(row, at).unwrap_or(0)
}

#[inline(always)]
fn field64(row: &[u8], at: u64) -> u64 {
    u64_at(row, at).unwrap_or(0)
}

#[inline(always)]
fn field8(row: &[u8], at: u64) -> u8 {
    take(row, at).map_or(0, |b: &[u8; 1]| u8::from_le_bytes(*b))
}

fn size_of(bytes: &[u8]) -> u64 {
    bytes.len() as u64
}

/// How many items a vector has; it lies in an index of less than 2^31 bytes.
fn count_of(bytes: &[u8], item: u64) -> u32 {
    size_of(bytes).checked_div(item).unwrap_or(0) as u32
}

fn align_up(n: u64, alignment: u64) -> Option<u64> {
    n.checked_add(alignment.wrapping_sub(1)).map(|n| n & !alignment.wrapping_sub(1))
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&b| b == 0)
}

fn ensure(fine: bool, error: Error) -> Result<(), Error> {
    if fine {
        Ok(())
    } else {
        Err(error)
    }
}

const CRC_NIBBLES: [u32; 16] = crc_nibbles();

const fn crc_nibbles() -> [u32; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        let (mut c, mut bit) = (i as u32, 0);
        while bit < 4 {
            c = if c & 1 == 1 { c >> 1 ^ 0xEDB8_8320 } else { c >> 1 };
            bit += 1;
        }
        table[i] = c;
        i += 1;
    }
    table
}

/// CRC-32 as in zlib, PNG and Ethernet. Its table takes 64 bytes of flash.
pub fn crc32(bytes: &[u8]) -> u32 {
    let step = |c: u32| c >> 4 ^ CRC_NIBBLES.get((c & 15) as usize).copied().unwrap_or(0);
    !bytes.iter().fold(NONE, |c, &b| step(step(c ^ u32::from(b))))
}

// Header and trailer

#[derive(Clone, Copy)]
struct Header {
    alignment: u64,
    base_alignment: u64,
    index_offset: u64,
    index_size: u64,
    payload_offset: u64,
    archive_size: u64,
    index_crc: u32,
    front: bool,
}

impl Header {
    /// What 64 bytes say; none for an unsealed header (R1 to R12).
    fn read(bytes: &[u8; 64]) -> Result<Option<Header>, Error> {
        ensure(take(bytes, 0) == Some(&MAGIC), Error::Magic)?;
        ensure(field8(bytes, 8) == VERSION, Error::Version)?;
        let (body, rest) = (part(bytes, 0, 60).unwrap_or(&[]), part(bytes, 10, 50).unwrap_or(&[]));
        ensure(crc32(body) == field32(bytes, 60), Error::HeaderCrc)?;
        let (log2, base_log2) = (field8(bytes, 9), field8(bytes, 10));
        ensure((4..=16).contains(&log2), Error::Alignment)?;
        if is_zero(rest) {
            return Ok(None);
        }
        ensure(field8(bytes, 11) == 0 && field32(bytes, 12) == 0, Error::HeaderReserved)?;
        ensure((log2..=16).contains(&base_log2), Error::BaseAlignment)?;
        ensure(field64(bytes, 16) == 0, Error::Features)?;
        let (index_offset, index_size, payload_offset) =
            (field64(bytes, 24), field64(bytes, 32), field64(bytes, 40));
        let header = Header {
            alignment: 1 << (log2 & 31),
            base_alignment: 1 << (base_log2 & 31),
            index_offset,
            index_size,
            payload_offset,
            archive_size: field64(bytes, 48),
            index_crc: field32(bytes, 56),
            front: index_offset == HEADER && payload_offset >= index_size.saturating_add(HEADER),
        };
        header.check_extents()?;
        Ok(Some(header))
    }

    fn check_extents(&self) -> Result<(), Error> {
        ensure((2 * HEADER..=MAX_SIZE).contains(&self.archive_size), Error::ArchiveSize)?;
        let end = self.end();
        let size = self.index_size;
        ensure(size != 0 && size % 8 == 0 && size < 1 << 31, Error::IndexSize)?;
        let odd = self.alignment.wrapping_sub(1);
        ensure(self.payload_offset & odd == 0 && self.payload_offset <= end, Error::PayloadOffset)?;
        let fits = if self.front {
            self.payload_offset.wrapping_sub(HEADER).wrapping_sub(size) < self.base_alignment
        } else {
            align_up(HEADER, self.alignment) == Some(self.payload_offset)
                && self.index_offset >= self.payload_offset
                && self.index_offset & odd == 0
                && self.index_offset.checked_add(size) == Some(end)
        };
        ensure(fits, Error::IndexOffset)
    }

    /// Where the trailer starts; `archive_size` is at least 128.
    fn end(&self) -> u64 {
        self.archive_size.saturating_sub(HEADER)
    }

    /// Where what lies between header, index, payloads and trailer starts and ends.
    fn payload_region(&self) -> (u64, u64) {
        if self.front {
            (HEADER.saturating_add(self.index_size), self.end())
        } else {
            (HEADER, self.index_offset)
        }
    }
}

/// Header and trailer agree on one archive, which is all of `data` (R8, R9, R14).
fn sealed(data: &[u8]) -> Result<Header, Error> {
    let size = size_of(data);
    let (first, last) = match (take::<64>(data, 0), size.checked_sub(HEADER).and_then(|at| take::<64>(data, at))) {
        (Some(first), Some(last)) if size >= 2 * HEADER => (first, last),
        _ => return Err(Error::TooShort),
    };
    let header = Header::read(first)?;
    ensure(header.map_or(true, |h| h.archive_size == size), Error::ArchiveSize)?;
    let trailer = Header::read(last)?.ok_or(Error::HeadersDiffer)?;
    ensure(trailer.archive_size == size, Error::ArchiveSize)?;
    let same = if header.is_some() { first == last } else { field8(first, 9) == field8(last, 9) };
    ensure(same, Error::HeadersDiffer)?;
    Ok(trailer)
}

/// Where a signed Windows program's certificate table starts, if that table is the end of `data`.
fn certificate_table(data: &[u8]) -> Option<u64> {
    let header = u64::from(u32_at(data, 60)?);
    let marks = (take(data, 0) == Some(b"MZ"), take(data, header) == Some(b"PE\0\0"));
    let directories = match (marks, u16_at(data, header.wrapping_add(24))?) {
        ((true, true), 0x10B) => header.wrapping_add(120),
        ((true, true), 0x20B) => header.wrapping_add(136),
        _ => return None,
    };
    let count = u32_at(data, directories.wrapping_sub(4))?;
    let table = take::<40>(data, directories)?;
    let (start, size) = (u64::from(field32(table, 32)), u64::from(field32(table, 36)));
    Some(start).filter(|_| count >= 5 && size != 0 && start.wrapping_add(size) == size_of(data))
}

/// Where the bytes end at whose end an archive may be: before a certificate table, and up to 7 zeros before that (R16).
fn unsigned_size(data: &[u8]) -> u64 {
    let table = match certificate_table(data) {
        None => return size_of(data),
        Some(table) => table,
    };
    let padded = (0..8).map_while(|zeros| table.checked_sub(zeros)).find(|&end| {
        let zeros = part(data, end, table.wrapping_sub(end)).map_or(false, is_zero);
        zeros && end.checked_sub(HEADER).map_or(false, |at| take(data, at) == Some(&MAGIC))
    });
    padded.unwrap_or(table)
}

// The index

/// An opened archive: where its vectors lie in the bytes it was opened on. Small enough to copy.
#[derive(Clone, Copy)]
pub struct Archive<'a> {
    data: &'a [u8],
    header: Header,
    digest_kind: u8,
    text: &'a [u8],
    dims: &'a [u8],
    strides: &'a [u8],
    words: &'a [u8],
    payloads: &'a [u8],
    tensors: &'a [u8],
    by_name: &'a [u8],
    by_module: Option<&'a [u8]>,
    modules: &'a [u8],
    attributes: &'a [u8],
    metadata: &'a [u8],
}

impl fmt::Debug for Archive<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Archive({} bytes, {} tensors)", self.data.len(), self.tensor_count())
    }
}

/// The root table of the index: each known field's place in it.
struct Root<'a> {
    index: &'a [u8],
    table: u64,
    table_size: u64,
    places: &'a [u8],
}

impl<'a> Root<'a> {
    /// Identifier, root table and vtable (R19, R20).
    fn read(index: &'a [u8]) -> Result<Root<'a>, Error> {
        let size = size_of(index);
        ensure(size >= 12 && take(index, 4) == Some(b"ZCR1"), Error::Identifier)?;
        let table = u64::from(field32(index, 0));
        ensure(table % 4 == 0, Error::Identifier)?;
        let distance = i64::from(u32_at(index, table).ok_or(Error::Identifier)? as i32);
        let vtable = (table as i64).wrapping_sub(distance); // both are less than 2^33
        let vtable = u64::try_from(vtable).map_err(|_| Error::Vtable)?;
        let vtable_size = u64::from(u16_at(index, vtable).ok_or(Error::Vtable)?);
        let table_size = u64::from(u16_at(index, vtable.wrapping_add(2)).ok_or(Error::Vtable)?);
        ensure(vtable % 2 == 0 && vtable_size % 2 == 0 && vtable_size >= 4 && table_size >= 4, Error::Vtable)?;
        ensure(part(index, table, table_size).is_some(), Error::Vtable)?;
        let places = part(index, vtable, vtable_size).and_then(|v| v.get(4..)).ok_or(Error::Vtable)?;
        Ok(Root { index, table, table_size, places })
    }

    /// Where a field lies in the index; none if it is missing (R21).
    fn field(&self, id: u64, width: u64) -> Result<Option<u64>, Error> {
        let place = u64::from(u16_at(self.places, id.wrapping_mul(2)).unwrap_or(0));
        if place == 0 {
            return Ok(None);
        }
        ensure(place >= 4 && place.wrapping_add(width) <= self.table_size, Error::Field)?;
        Ok(Some(self.table.wrapping_add(place)))
    }

    /// The items of a vector; none if it is missing (R22).
    fn vector(&self, id: u64, item: u64, alignment: u64) -> Result<Option<&'a [u8]>, Error> {
        let at = match self.field(id, 4)? {
            None => return Ok(None),
            Some(at) => at,
        };
        let start = at.wrapping_add(u64::from(u32_at(self.index, at).ok_or(Error::Vector)?));
        ensure(at % 4 == 0 && start % 4 == 0, Error::Vector)?;
        let count = u64::from(u32_at(self.index, start).ok_or(Error::Vector)?);
        let start = start.wrapping_add(4);
        ensure(start & alignment.wrapping_sub(1) == 0, Error::Vector)?;
        part(self.index, start, count.wrapping_mul(item)).map(Some).ok_or(Error::Vector)
    }
}

impl<'a> Archive<'a> {
    /// Opens the archive that is all of `data`, in time that does not depend on its size (the `[open]` rules).
    pub fn open(data: &'a [u8]) -> Result<Archive<'a>, Error> {
        let header = sealed(data)?;
        let index = part(data, header.index_offset, header.index_size).ok_or(Error::IndexOffset)?;
        let root = Root::read(index)?;
        let digest_kind = root.field(0, 1)?.map_or(0, |at| field8(index, at));
        let vector = |id, item, alignment| root.vector(id, item, alignment).map(Option::unwrap_or_default);
        let archive = Archive {
            data,
            header,
            digest_kind,
            text: vector(1, 1, 1)?,
            dims: vector(2, 8, 8)?,
            strides: vector(3, 8, 8)?,
            words: vector(4, 8, 8)?,
            payloads: vector(5, PAYLOAD, 8)?,
            tensors: vector(6, TENSOR, 8)?,
            by_name: vector(7, 4, 4)?,
            by_module: root.vector(8, 4, 4)?,
            modules: vector(9, MODULE, 4)?,
            attributes: vector(10, ATTRIBUTE, 8)?,
            metadata: vector(11, ATTRIBUTE, 8)?,
        };
        archive.check_counts()?;
        Ok(archive)
    }

    /// Opens the archive at the start of `data`, which may go on: in flash, for example. Its header must be sealed.
    pub fn open_prefix(data: &'a [u8]) -> Result<Archive<'a>, Error> {
        ensure(size_of(data) >= 2 * HEADER, Error::TooShort)?;
        let header = Header::read(take(data, 0).ok_or(Error::TooShort)?)?.ok_or(Error::Unsealed)?;
        Archive::open(part(data, 0, header.archive_size).ok_or(Error::ArchiveSize)?)
    }

    /// Opens the archive at the end of `data`: one that was appended to an executable, for example; before the signature
    /// of a Windows program that was signed after.
    pub fn open_suffix(data: &'a [u8]) -> Result<Archive<'a>, Error> {
        ensure(size_of(data) >= 2 * HEADER, Error::TooShort)?;
        let size = unsigned_size(data);
        let trailer = size.checked_sub(HEADER).and_then(|at| take(data, at)).ok_or(Error::Suffix)?;
        let trailer = Header::read(trailer)?.ok_or(Error::Suffix)?;
        let start = size.checked_sub(trailer.archive_size).ok_or(Error::Suffix)?;
        Archive::open(part(data, start, trailer.archive_size).ok_or(Error::Suffix)?)
    }

    /// Counts that must agree, and where the payloads end (R13, R24, R25, R37).
    fn check_counts(&self) -> Result<(), Error> {
        let count = u64::from(self.tensor_count()).wrapping_mul(4);
        ensure(size_of(self.by_name) == count, Error::VectorLength)?;
        ensure(self.by_module.map_or(true, |m| size_of(m) == count), Error::VectorLength)?;
        ensure(self.module_count() != 0, Error::Root)?;
        ensure(self.digest_kind <= 1, Error::DigestKind)?;
        let end = match self.payload_count().checked_sub(1).and_then(|last| self.range(last)) {
            None => 0,
            Some((offset, nbytes, _)) => offset.checked_add(nbytes).ok_or(Error::PayloadEnd)?,
        };
        let region = self.header.payload_region().1.wrapping_sub(self.header.payload_offset);
        ensure(align_up(end, self.header.alignment) == Some(region), Error::PayloadEnd)
    }

    /// All bytes of the archive.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// The alignment of every payload, in the archive.
    pub fn alignment(&self) -> u32 {
        self.header.alignment as u32
    }

    /// What the archive's address should be a multiple of.
    pub fn base_alignment(&self) -> u32 {
        self.header.base_alignment as u32
    }

    /// How many tensors there are.
    pub fn tensor_count(&self) -> u32 {
        count_of(self.tensors, TENSOR)
    }

    /// How many modules there are, the record itself included.
    pub fn module_count(&self) -> u32 {
        count_of(self.modules, MODULE)
    }

    /// How many attributes there are, of all modules.
    pub fn attribute_count(&self) -> u32 {
        count_of(self.attributes, ATTRIBUTE)
    }

    /// How many values the file itself carries.
    pub fn metadata_count(&self) -> u32 {
        count_of(self.metadata, ATTRIBUTE)
    }

    fn payload_count(&self) -> u32 {
        count_of(self.payloads, PAYLOAD)
    }

    // Text

    /// The bytes of a span (R27).
    fn span(&self, (start, size): Span) -> Result<&'a [u8], Error> {
        let with_nul = part(self.text, u64::from(start), u64::from(size).wrapping_add(1));
        match with_nul.and_then(<[u8]>::split_last) {
            Some((0, bytes)) => Ok(bytes),
            _ => Err(Error::Span),
        }
    }

    /// A span as text (R27, R28).
    fn text(&self, span: Span) -> Result<&'a str, Error> {
        str::from_utf8(self.span(span)?).map_err(|_| Error::Utf8)
    }

    /// A span as a type's name, which may be empty but holds no NUL (R29).
    fn type_name(&self, span: Span) -> Result<&'a str, Error> {
        let text = self.text(span)?;
        ensure(text.bytes().all(|b| b != 0), Error::Name)?; // core's `contains` can panic
        Ok(text)
    }

    /// A span as a name (R29).
    fn name(&self, span: Span) -> Result<&'a str, Error> {
        let name = self.type_name(span)?;
        ensure(!name.is_empty(), Error::Name)?;
        Ok(name)
    }

    // Payloads

    fn range(&self, number: u32) -> Option<(u64, u64, u64)> {
        let row = take::<24>(self.payloads, u64::from(number).wrapping_mul(PAYLOAD))?;
        Some((field64(row, 0), field64(row, 8), field64(row, 16)))
    }

    /// A payload and where it lies in the archive, its own rules checked (R56 to R60).
    fn payload(&self, number: u32) -> Result<(&'a [u8], u64), Error> {
        let (offset, nbytes, digest) = self.range(number).ok_or(Error::PayloadNumber)?;
        let h = &self.header;
        ensure(nbytes != 0 && nbytes <= MAX_SIZE && offset <= MAX_SIZE, Error::PayloadRange)?;
        let start = offset.wrapping_add(h.payload_offset);
        let end = start.wrapping_add(nbytes);
        ensure(end <= h.payload_region().1, Error::PayloadRange)?;
        ensure(start & h.alignment.wrapping_sub(1) == 0, Error::PayloadAlignment)?;
        let before = number.checked_sub(1).and_then(|n| self.range(n)).unwrap_or((0, 0, 0));
        let before_end = before.0.saturating_add(before.1);
        if (before.0, before.1) == (offset, nbytes) {
            ensure(before.2 == digest, Error::PayloadDigest)?;
        } else {
            ensure(offset >= before_end, Error::PayloadOverlap)?;
            ensure(offset.wrapping_sub(before_end) < h.base_alignment, Error::PayloadHole)?;
        }
        ensure(self.digest_kind != 0 || digest == 0, Error::PayloadDigest)?;
        Ok((part(self.data, start, nbytes).ok_or(Error::PayloadRange)?, start))
    }

    // Tensors

    fn tensor_row(&self, number: u32) -> Result<TensorRow, Error> {
        let row = take::<48>(self.tensors, u64::from(number).wrapping_mul(TENSOR)).ok_or(Error::NotFound)?;
        Ok(TensorRow::read(row))
    }

    /// Tensor `number` in saved order; every rule about it alone is checked, the payload's own included.
    pub fn tensor(&self, number: u32) -> Result<Tensor<'a>, Error> {
        let row = self.tensor_row(number)?;
        let name = self.name(row.name)?;
        ensure(row.reserved == 0, Error::Reserved)?;
        ensure(row.rank <= MAX_RANK, Error::Rank)?;
        ensure(row.parent < self.module_count(), Error::Parent)?;
        ensure(row.key_size != 0 && row.key_size <= row.name.1, Error::KeySize)?;
        ensure(DType(row.dtype).takes(row.bits), Error::ElementType)?;
        let items = u64::from(row.rank).wrapping_mul(8);
        let dims = part(self.dims, u64::from(row.dims).wrapping_mul(8), items).ok_or(Error::Dims)?;
        let (count, empty) = count_elements(dims, row.bits)?;
        ensure(empty == (row.payload == NONE), Error::PayloadNumber)?;
        let (payload, at) = if empty { (&[][..], 0) } else { self.payload(row.payload)? };
        let strides = match row.strides {
            NONE => None,
            start => Some(part(self.strides, u64::from(start).wrapping_mul(8), items).ok_or(Error::Strides)?),
        };
        let tensor = Tensor {
            number,
            name,
            key_size: row.key_size,
            parent: row.parent,
            place: row.place,
            dtype: DType(row.dtype),
            bits: row.bits,
            count: if empty { 0 } else { count },
            dims,
            strides,
            payload,
            at,
            byte_offset: row.byte_offset,
        };
        tensor.check_bytes()?;
        Ok(tensor)
    }

    /// The tensor with that full name: about log2(n) comparisons of names, then as [`Archive::tensor`]; as FORMAT.md says
    /// of level `touch`, an entry on the way that is wrong is an error and not passed over.
    pub fn get(&self, name: &str) -> Result<Tensor<'a>, Error> {
        let (mut low, mut high) = (0, self.tensor_count());
        while low < high {
            let middle = low.wrapping_add(high.wrapping_sub(low) / 2);
            let number = u32_at(self.by_name, u64::from(middle).wrapping_mul(4)).ok_or(Error::NameOrder)?;
            let span = self.tensor_row(number).map_err(|_| Error::NameOrder)?.name;
            match self.span(span)?.cmp(name.as_bytes()) {
                Ordering::Equal => return self.tensor(number),
                Ordering::Less => low = middle.wrapping_add(1),
                Ordering::Greater => high = middle,
            }
        }
        Err(Error::NotFound)
    }

    /// Every tensor in saved order, each checked as it comes.
    pub fn iter(&self) -> Tensors<'_, 'a> {
        Tensors { archive: self, next: 0, end: self.tensor_count(), order: None }
    }

    /// Every full name in saved order.
    pub fn names(&self) -> impl Iterator<Item = Result<&'a str, Error>> + '_ {
        (0..self.tensor_count()).map(move |i| self.name(self.tensor_row(i)?.name))
    }

    // Modules, attributes and metadata

    fn module_row(&self, number: u32) -> Option<&'a [u8; 48]> {
        take(self.modules, u64::from(number).wrapping_mul(MODULE))
    }

    /// Module `number` in pre-order; 0 is the record itself.
    pub fn module(&self, number: u32) -> Result<Module<'a>, Error> {
        let row = self.module_row(number).ok_or(Error::NotFound)?;
        let span = (field32(row, 0), field32(row, 4));
        let name = if number == 0 { self.type_name(span)? } else { self.name(span)? };
        let key_size = field32(row, 16);
        ensure(key_size <= span.1, Error::KeySize)?;
        Ok(Module {
            number,
            name,
            type_name: self.type_name((field32(row, 8), field32(row, 12)))?,
            key_size,
            parent: Some(field32(row, 20)).filter(|&parent| parent != NONE),
            end: field32(row, 24),
            place: field32(row, 28),
            kind: ModuleKind(field8(row, 40)),
        })
    }

    /// The module with that full name, `""` for the record; looks at no module whose name the path does not start with.
    pub fn find_module(&self, path: &str) -> Result<Module<'a>, Error> {
        let mut number = 0;
        while number < self.module_count() {
            let module = self.module(number)?;
            if module.name == path {
                return Ok(module);
            }
            let below = path.strip_prefix(module.name).map_or(false, |rest| rest.starts_with('.'));
            let next = if below || number == 0 { 0 } else { module.end };
            number = next.max(number.wrapping_add(1));
        }
        Err(Error::NotFound)
    }

    /// Every module in pre-order.
    pub fn modules(&self) -> impl Iterator<Item = Result<Module<'a>, Error>> + '_ {
        (0..self.module_count()).map(move |i| self.module(i))
    }

    /// Where what belongs to a module itself starts and ends, by the column at `at` of `modules`.
    fn own(&self, module: u32, at: u64, count: u32) -> (u32, u32) {
        let first = |number| self.module_row(number).map_or(count, |row| field32(row, at)).min(count);
        let (start, end) = (first(module), first(module.saturating_add(1)));
        (start.min(end), end)
    }

    /// A module's own tensors, in saved order.
    pub fn tensors_of(&self, module: &Module<'a>) -> Tensors<'_, 'a> {
        let (next, end) = self.own(module.number, 32, self.tensor_count());
        Tensors { archive: self, next, end, order: self.by_module }
    }

    /// The modules directly in a module, in pre-order.
    pub fn modules_of(&self, module: &Module<'a>) -> Modules<'_, 'a> {
        Modules { archive: self, next: module.number.saturating_add(1), end: module.end }
    }

    /// A module's own attributes, in the order of their places.
    pub fn attributes_of(&self, module: &Module<'a>) -> Attributes<'_, 'a> {
        let (next, end) = self.own(module.number, 36, self.attribute_count());
        Attributes { archive: self, rows: self.attributes, next, end }
    }

    /// The attribute of a module with that key.
    pub fn attribute(&self, module: &Module<'a>, key: &str) -> Result<Attribute<'a>, Error> {
        for found in self.attributes_of(module) {
            match found {
                Ok(attribute) if attribute.name != key => {}
                other => return other,
            }
        }
        Err(Error::NotFound)
    }

    /// Every attribute, ascending by module and place.
    pub fn attributes(&self) -> Attributes<'_, 'a> {
        Attributes { archive: self, rows: self.attributes, next: 0, end: self.attribute_count() }
    }

    /// What the file itself carries, names ascending.
    pub fn metadata(&self) -> Attributes<'_, 'a> {
        Attributes { archive: self, rows: self.metadata, next: 0, end: self.metadata_count() }
    }

    /// What the file carries under that name.
    pub fn metadata_value(&self, name: &str) -> Result<Value<'a>, Error> {
        let (mut low, mut high) = (0, self.metadata_count());
        while low < high {
            let middle = low.wrapping_add(high.wrapping_sub(low) / 2);
            let found = self.read_attribute(self.metadata, middle)?;
            match found.name.cmp(name) {
                Ordering::Equal => return Ok(found.value),
                Ordering::Less => low = middle.wrapping_add(1),
                Ordering::Greater => high = middle,
            }
        }
        Err(Error::NotFound)
    }

    fn read_attribute(&self, rows: &'a [u8], number: u32) -> Result<Attribute<'a>, Error> {
        let row = take::<32>(rows, u64::from(number).wrapping_mul(ATTRIBUTE)).ok_or(Error::NotFound)?;
        let (word, kind, form) = (field64(row, 8), field8(row, 24), field8(row, 25));
        ensure(kind <= BYTES && form <= 2, Error::ValueType)?;
        let value = if form == 0 {
            self.value(kind, word)?
        } else {
            let (start, count) = halves(word);
            let start = u64::from(start).wrapping_mul(8);
            let words = part(self.words, start, u64::from(count).wrapping_mul(8)).ok_or(Error::List)?;
            let items = Items { archive: *self, kind, words };
            if form == 1 {
                Value::List(items)
            } else {
                Value::Tuple(items)
            }
        };
        let parent = Some(field32(row, 16)).filter(|&parent| parent != NONE);
        let name = self.name((field32(row, 0), field32(row, 4)))?;
        Ok(Attribute { name, parent, place: field32(row, 20), kind, value })
    }

    /// One word of a value (R68).
    fn value(&self, kind: u8, word: u64) -> Result<Value<'a>, Error> {
        Ok(match kind {
            0 if word == 0 => Value::Nil,
            1 if word <= 1 => Value::Bool(word == 1),
            2 => Value::Int(word as i64),
            3 => Value::Uint(word),
            4 => Value::Float(f64::from_bits(word)),
            TEXT => Value::Text(self.text(halves(word))?),
            BYTES if word == u64::from(NONE) => Value::Bytes(&[]),
            BYTES => Value::Bytes(self.payload(u32::try_from(word).map_err(|_| Error::Value)?)?.0),
            _ => return Err(Error::Value),
        })
    }

    /// How many children a module has itself: tensors, modules and attributes.
    pub fn child_count(&self, module: &Module<'a>) -> u32 {
        let (tensors, attributes) = (self.tensors_of(module), self.attributes_of(module));
        let own = tensors.end.wrapping_sub(tensors.next);
        own.wrapping_add(attributes.end.wrapping_sub(attributes.next)).wrapping_add(self.modules_of(module).walk())
    }

    /// A module's children of every kind in the order of their places; uses [`Archive::child_count`] scratch words.
    pub fn children<'s>(&'s self, module: &Module<'a>, scratch: &'s mut [u32]) -> Result<Children<'s, 'a>, Error> {
        let room = scratch.get_mut(..self.child_count(module) as usize).ok_or(Error::ScratchTooSmall)?;
        room.fill(NONE);
        let mut put = |place: u32, code: u32| match room.get_mut(place as usize) {
            Some(slot) if *slot == NONE => {
                *slot = code;
                Ok(())
            }
            _ => Err(Error::Places),
        };
        for tensor in self.tensors_of(module) {
            let tensor = tensor?;
            put(tensor.place, tensor.number)?;
        }
        let attributes = self.attributes_of(module);
        let first = self.tensor_count().wrapping_add(attributes.next);
        for (attribute, code) in attributes.zip(first..) {
            put(attribute?.place, code)?;
        }
        let base = self.tensor_count().wrapping_add(self.attribute_count());
        for inner in self.modules_of(module) {
            let inner = inner?;
            put(inner.place, base.wrapping_add(inner.number))?;
        }
        Ok(Children { archive: self, codes: room, next: 0 })
    }
}

type Span = (u32, u32);

fn halves(word: u64) -> Span {
    (word as u32, (word >> 32) as u32)
}

/// The product of the dims that are not zero, and whether one is; at most 2^56 bytes (R49).
fn count_elements(dims: &[u8], bits: u8) -> Result<(u64, bool), Error> {
    let bits = if bits == 0 { 64 } else { u64::from(bits) };
    let most = (MAX_SIZE << 3).checked_div(bits).unwrap_or(0);
    let (mut count, mut empty) = (1u64, false);
    for dim in U64s(dims) {
        if dim == 0 {
            empty = true;
        } else {
            ensure(dim <= most.checked_div(count).unwrap_or(0), Error::Shape)?;
            count = count.wrapping_mul(dim);
        }
    }
    Ok((count, empty))
}

struct TensorRow {
    name: Span,
    key_size: u32,
    parent: u32,
    place: u32,
    payload: u32,
    byte_offset: u64,
    dims: u32,
    strides: u32,
    dtype: u8,
    bits: u8,
    rank: u8,
    reserved: u32,
}

impl TensorRow {
    fn read(row: &[u8; 48]) -> TensorRow {
        TensorRow {
            name: (field32(row, 0), field32(row, 4)),
            key_size: field32(row, 8),
            parent: field32(row, 12),
            place: field32(row, 16),
            payload: field32(row, 20),
            byte_offset: field64(row, 24),
            dims: field32(row, 32),
            strides: field32(row, 36),
            dtype: field8(row, 40),
            bits: field8(row, 41),
            rank: field8(row, 42),
            reserved: u32::from(field8(row, 43)) | field32(row, 44),
        }
    }
}

/// An element type, by its code in FORMAT.md.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DType(pub u8);

macro_rules! dtypes {
    ($($name:ident $text:literal $code:literal $bits:literal,)*) => {
        impl DType {
            $(#[doc = $text] pub const $name: DType = DType($code);)*

            /// The name in FORMAT.md, `"unknown"` for a type of a later version.
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($code => $text,)*
                    _ => "unknown",
                }
            }

            /// The natural width, none for a type of a later version.
            pub const fn bits(self) -> Option<u8> {
                match self.0 {
                    $($code => Some($bits),)*
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    // generated by tools/generate from dtypes.py: types
    BOOL "bool" 1 8,
    UINT8 "uint8" 2 8,
    INT8 "int8" 3 8,
    UINT16 "uint16" 4 16,
    INT16 "int16" 5 16,
    UINT32 "uint32" 6 32,
    INT32 "int32" 7 32,
    UINT64 "uint64" 8 64,
    INT64 "int64" 9 64,
    FLOAT16 "float16" 16 16,
    BFLOAT16 "bfloat16" 17 16,
    FLOAT32 "float32" 18 32,
    FLOAT64 "float64" 19 64,
    COMPLEX64 "complex64" 20 64,
    COMPLEX128 "complex128" 21 128,
    FLOAT8_E4M3FN "float8_e4m3fn" 32 8,
    FLOAT8_E4M3FNUZ "float8_e4m3fnuz" 33 8,
    FLOAT8_E5M2 "float8_e5m2" 34 8,
    FLOAT8_E5M2FNUZ "float8_e5m2fnuz" 35 8,
    FLOAT8_E8M0FNU "float8_e8m0fnu" 36 8,
    FLOAT6_E2M3FN "float6_e2m3fn" 48 6,
    FLOAT6_E3M2FN "float6_e3m2fn" 49 6,
    FLOAT4_E2M1FN "float4_e2m1fn" 50 4,
    UINT4 "uint4" 51 4,
    INT4 "int4" 52 4,
    UINT2 "uint2" 53 2,
    INT2 "int2" 54 2,
    STRING "string" 64 0,
    // end
}

impl DType {
    /// Whether elements may take `bits` bits: the natural width, 8 for narrow types, 1 to 128 for unknown ones (R46).
    fn takes(self, bits: u8) -> bool {
        match self.bits() {
            Some(natural) => bits == natural || (bits == 8 && (1..8).contains(&natural)),
            None => self.0 != 0 && (1..=128).contains(&bits),
        }
    }
}

/// u64s that lie in a row.
#[derive(Clone)]
pub struct U64s<'a>(&'a [u8]);

impl Iterator for U64s<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let value = u64_at(self.0, 0)?;
        self.0 = self.0.get(8..)?;
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.len() / 8, Some(self.0.len() / 8))
    }
}

impl ExactSizeIterator for U64s<'_> {}

/// A tensor: what the index says of it, checked, and the bytes of its payload.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    number: u32,
    name: &'a str,
    key_size: u32,
    parent: u32,
    place: u32,
    dtype: DType,
    bits: u8,
    count: u64,
    dims: &'a [u8],
    strides: Option<&'a [u8]>,
    payload: &'a [u8],
    at: u64,
    byte_offset: u64,
}

/// The tail of a full name that is the key in its module.
fn key_of(name: &str, key_size: u32) -> &str {
    name.len().checked_sub(key_size as usize).and_then(|at| name.get(at..)).unwrap_or("")
}

impl<'a> Tensor<'a> {
    /// The shape fits the payload (R50 to R55, R71).
    fn check_bytes(&self) -> Result<(), Error> {
        let available = size_of(self.payload);
        let whole = self.bits % 8 == 0 && self.dtype.0 != STRING;
        if self.strides.is_some() {
            ensure(whole, Error::Strides)?;
            ensure(self.count != 0, Error::PayloadNumber)?;
            return self.check_strides(available);
        }
        ensure(self.byte_offset == 0, Error::PayloadSize)?;
        if self.count == 0 {
            return Ok(());
        }
        if self.dtype.0 == STRING {
            let table = self.count.wrapping_add(1).wrapping_mul(8);
            return ensure(available % 8 == 0 && available >= table, Error::Strings);
        }
        ensure(available == self.nbytes(), Error::PayloadSize)
    }

    /// Lowest and highest element reached lie in the payload; each axis is bounded by division first (R53 to R55).
    fn check_strides(&self, available: u64) -> Result<(), Error> {
        const LIMIT: i64 = MAX_SIZE as i64;
        let (mut low, mut high) = (0i64, 0i64);
        for (dim, stride) in U64s(self.dims).zip(U64s(self.strides.unwrap_or(&[]))) {
            let (reach, stride) = (dim.wrapping_sub(1), stride as i64); // no dim is 0
            let most = MAX_SIZE.checked_div(reach.max(1)).unwrap_or(0);
            ensure(stride.unsigned_abs() <= most, Error::Reach)?;
            let step = stride.wrapping_mul(reach as i64); // a dim is at most 2^59
            low = low.wrapping_add(step.min(0));
            high = high.wrapping_add(step.max(0));
            ensure(low >= -LIMIT && high <= LIMIT, Error::Reach)?;
        }
        let item = i64::from(self.bits / 8);
        ensure(self.byte_offset <= MAX_SIZE, Error::Reach)?;
        let first = self.byte_offset as i64;
        let start = first.wrapping_add(low.wrapping_mul(item));
        let end = first.wrapping_add(high.wrapping_add(1).wrapping_mul(item));
        ensure(start >= 0 && end <= available as i64, Error::Reach)?;
        ensure(first.checked_rem(item) == Some(0), Error::ByteOffset)?;
        ensure(self.nbytes() <= available, Error::ViewSize)
    }

    /// Its number in saved order.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The full name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The key in its module.
    pub fn key(&self) -> &'a str {
        key_of(self.name, self.key_size)
    }

    /// The number of its module.
    pub fn parent(&self) -> u32 {
        self.parent
    }

    /// Its place among the module's children of every kind.
    pub fn place(&self) -> u32 {
        self.place
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bits stored per element: less than 8 where elements lie packed, 0 for strings.
    pub fn bits(&self) -> u8 {
        self.bits
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.dims.len() / 8
    }

    /// The dims, outermost first.
    pub fn shape(&self) -> U64s<'a> {
        U64s(self.dims)
    }

    /// The strides in elements, where they are stored; none means C order.
    pub fn strides(&self) -> Option<impl ExactSizeIterator<Item = i64> + 'a> {
        self.strides.map(|strides| U64s(strides).map(|s| s as i64))
    }

    /// The number of elements.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// How many bytes the elements take in C order; of strings, all there are.
    pub fn nbytes(&self) -> u64 {
        if self.dtype.0 == STRING {
            return size_of(self.payload);
        }
        self.count.wrapping_mul(u64::from(self.bits)).wrapping_add(7) >> 3 // at most 2^59 bits (R49)
    }

    /// Where element [0, ..., 0] lies in the archive; none without bytes.
    pub fn offset(&self) -> Option<u64> {
        if self.count == 0 {
            None
        } else {
            self.at.checked_add(self.byte_offset)
        }
    }

    /// All bytes of the payload, which tied tensors and views share.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Whether elements lie in C order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1u64;
        let strides = match self.strides {
            None => return true,
            Some(strides) => strides,
        };
        (0..self.rank() as u64).rev().all(|axis| {
            let dim = field64(self.dims, axis.wrapping_mul(8));
            let fits = dim == 1 || field64(strides, axis.wrapping_mul(8)) == expected;
            expected = expected.wrapping_mul(dim);
            fits
        })
    }

    /// The elements' bytes in C order, little-endian; packed elements and strings as they are stored.
    pub fn bytes(&self) -> Result<&'a [u8], Error> {
        ensure(self.is_contiguous(), Error::Strided)?;
        part(self.payload, self.byte_offset, self.nbytes()).ok_or(Error::Reach)
    }

    /// Element number `index` in C order, through strides; none past the end, and for packed elements and strings.
    pub fn element(&self, index: u64) -> Option<&'a [u8]> {
        if index >= self.count || self.bits % 8 != 0 || self.bits == 0 {
            return None;
        }
        let item = u64::from(self.bits / 8);
        let mut at = index;
        if let Some(strides) = self.strides {
            let (mut left, mut steps) = (index, 0i64);
            for axis in (0..self.rank() as u64).rev() {
                let dim = field64(self.dims, axis.wrapping_mul(8));
                let stride = field64(strides, axis.wrapping_mul(8)) as i64;
                steps = steps.wrapping_add(stride.wrapping_mul(left.checked_rem(dim)? as i64));
                left = left.checked_div(dim)?;
            }
            at = steps as u64;
        }
        part(self.payload, self.byte_offset.wrapping_add(at.wrapping_mul(item)), item)
    }

    /// The number in C order of the element at `[i, j, ...]`; none outside the shape.
    pub fn index(&self, at: &[u64]) -> Option<u64> {
        let mut index = 0u64;
        for (axis, dim) in self.shape().enumerate() {
            let i = *at.get(axis)?;
            if i >= dim {
                return None;
            }
            index = index.checked_mul(dim)?.checked_add(i)?;
        }
        Some(index).filter(|_| at.len() == self.rank())
    }

    /// Element number `index` in C order; none past the end, or where `T` is another type.
    pub fn value<T: Element>(&self, index: u64) -> Option<T> {
        if !T::is(self.dtype, self.bits) {
            return None;
        }
        T::read(self.element(index)?)
    }

    /// All elements in C order, through strides, at any address: `for x in tensor.values::<f32>()?`.
    pub fn values<T: Element>(&self) -> Result<Values<'a, T>, Error> {
        ensure(T::is(self.dtype, self.bits), Error::WrongType)?;
        let dense = self.bytes().ok();
        Ok(Values { tensor: *self, dense, next: 0, of: PhantomData })
    }

    /// The raw bits of packed element `index`, in the low bits of the byte (R70).
    pub fn packed(&self, index: u64) -> Option<u8> {
        if index >= self.count || self.bits == 0 || self.bits >= 8 {
            return None;
        }
        let bit = index.wrapping_mul(u64::from(self.bits)); // at most 2^59 (R49)
        let low: &[u8; 1] = take(self.payload, bit >> 3)?;
        let high = take(self.payload, (bit >> 3).wrapping_add(1)).map_or(0, |b: &[u8; 1]| u8::from_le_bytes(*b));
        let pair = u16::from_le_bytes([u8::from_le_bytes(*low), high]) >> (bit & 7);
        Some(pair as u8 & (1u8 << (self.bits & 7)).wrapping_sub(1))
    }

    /// String number `index` in C order; the ends that bound it are checked (R71).
    pub fn string(&self, index: u64) -> Result<&'a [u8], Error> {
        ensure(self.dtype.0 == STRING, Error::WrongType)?;
        ensure(index < self.count, Error::NotFound)?;
        let (room, ends) = self.strings().ok_or(Error::Strings)?;
        let at = index.wrapping_mul(8);
        let (start, end) = (field64(ends, at), u64_at(ends, at.wrapping_add(8)).ok_or(Error::Strings)?);
        part(room, start, end.checked_sub(start).ok_or(Error::Strings)?).ok_or(Error::Strings)
    }

    /// The room for the strings' bytes, and their ends.
    fn strings(&self) -> Option<(&'a [u8], &'a [u8])> {
        let table = self.count.checked_add(1)?.checked_mul(8)?;
        let room = size_of(self.payload).checked_sub(table)?;
        Some((part(self.payload, 0, room)?, part(self.payload, room, table)?))
    }

    /// Ends ascend from 0 to less than 8 before their table, zeros between; `scanned`: this payload's were seen before.
    fn check_strings(&self, scanned: impl FnOnce() -> bool) -> Result<(), Error> {
        let (room, ends) = self.strings().ok_or(Error::Strings)?;
        let last = field64(ends, self.count.wrapping_mul(8));
        let rest = size_of(room).checked_sub(last).ok_or(Error::Strings)?;
        ensure(rest < 8 && is_zero(part(room, last, rest).unwrap_or(&[])), Error::Strings)?;
        if scanned() {
            return Ok(()); // only one number of strings fits a payload's last end, so it was this one's
        }
        ensure(field64(ends, 0) == 0, Error::Strings)?;
        let mut before = 0;
        for end in U64s(ends) {
            ensure(end >= before, Error::Strings)?;
            before = end;
        }
        Ok(())
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?}, {}, [", self.name, self.dtype.name())?;
        for (axis, dim) in self.shape().enumerate() {
            write!(f, "{}{}", if axis == 0 { "" } else { ", " }, dim)?;
        }
        f.write_str("])")
    }
}

/// A type that elements are read as. `u16` also stands for the bits of `float16` and `bfloat16`, `u8` for those of
/// `bool`, the 8-bit floats, and narrow types stored one to a byte.
pub trait Element: Sized {
    /// Whether elements of that type and width are read as this.
    fn is(dtype: DType, bits: u8) -> bool;
    /// The value of one element's bytes; none if there are too few or too many.
    fn read(bytes: &[u8]) -> Option<Self>;
}

macro_rules! elements {
    ($($type:ty: $($dtype:ident)*;)*) => {$(
        impl Element for $type {
            fn is(dtype: DType, _: u8) -> bool {
                [$(DType::$dtype),*].contains(&dtype)
            }

            fn read(bytes: &[u8]) -> Option<$type> {
                Some(<$type>::from_le_bytes(bytes.try_into().ok()?))
            }
        }
    )*};
}

elements! {
    // generated by tools/generate from dtypes.py: elements
    i8: INT8;
    u16: UINT16 FLOAT16 BFLOAT16;
    i16: INT16;
    u32: UINT32;
    i32: INT32;
    u64: UINT64;
    i64: INT64;
    f32: FLOAT32;
    f64: FLOAT64;
    // end
}

impl Element for u8 {
    fn is(dtype: DType, bits: u8) -> bool {
        bits == 8 && dtype != DType::INT8
    }

    fn read(bytes: &[u8]) -> Option<u8> {
        take(bytes, 0).map(|b: &[u8; 1]| u8::from_le_bytes(*b))
    }
}

impl Element for [f32; 2] {
    fn is(dtype: DType, _: u8) -> bool {
        dtype == DType::COMPLEX64
    }

    fn read(bytes: &[u8]) -> Option<[f32; 2]> {
        Some([f32::read(bytes.get(..4)?)?, f32::read(bytes.get(4..)?)?])
    }
}

impl Element for [f64; 2] {
    fn is(dtype: DType, _: u8) -> bool {
        dtype == DType::COMPLEX128
    }

    fn read(bytes: &[u8]) -> Option<[f64; 2]> {
        Some([f64::read(bytes.get(..8)?)?, f64::read(bytes.get(8..)?)?])
    }
}

/// The elements of a tensor in C order.
#[derive(Clone)]
pub struct Values<'a, T> {
    tensor: Tensor<'a>,
    dense: Option<&'a [u8]>,
    next: u64,
    of: PhantomData<T>,
}

impl<T: Element> Iterator for Values<'_, T> {
    type Item = T;

    #[inline]
    fn next(&mut self) -> Option<T> {
        let index = self.next;
        self.next = index.saturating_add(1);
        match self.dense {
            None => T::read(self.tensor.element(index)?),
            Some(bytes) => {
                let item = u64::from(self.tensor.bits / 8);
                T::read(part(bytes, index.wrapping_mul(item), item)?)
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.tensor.count.saturating_sub(self.next)).ok();
        (left.unwrap_or(usize::MAX), left)
    }
}

/// What a module stands for, by its code in FORMAT.md; an unknown kind is read as a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModuleKind(pub u8);

impl ModuleKind {
    /// Children are reached by key.
    pub const MAPPING: ModuleKind = ModuleKind(1);
    /// Children are in the order of their places, their keys `0`, `1`, ...
    pub const LIST: ModuleKind = ModuleKind(2);
    /// As a list; with a type name a named tuple, its keys the fields.
    pub const TUPLE: ModuleKind = ModuleKind(3);
    /// Children are the fields of an object.
    pub const OBJECT: ModuleKind = ModuleKind(4);
    /// A mapping whose keys that are decimal integers of 64 bits are integers.
    pub const NUMBERED: ModuleKind = ModuleKind(5);
}

/// A module: a mapping, list, tuple or object of tensors, attributes and other modules.
#[derive(Clone, Copy, Debug)]
pub struct Module<'a> {
    number: u32,
    name: &'a str,
    type_name: &'a str,
    key_size: u32,
    parent: Option<u32>,
    end: u32,
    place: u32,
    kind: ModuleKind,
}

impl<'a> Module<'a> {
    /// Its number in pre-order.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The full name, empty for the record itself.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The key in its module.
    pub fn key(&self) -> &'a str {
        key_of(self.name, self.key_size)
    }

    /// The name of a class, or of a convention such as `zcr:quantized`; perhaps empty.
    pub fn type_name(&self) -> &'a str {
        self.type_name
    }

    /// What it stands for.
    pub fn kind(&self) -> ModuleKind {
        self.kind
    }

    /// The number of its module; none for the record itself.
    pub fn parent(&self) -> Option<u32> {
        self.parent
    }

    /// One past the number of its last descendant.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Its place among its parent's children of every kind.
    pub fn place(&self) -> u32 {
        self.place
    }
}

/// A small value that belongs to a module or to the file.
#[derive(Clone, Copy, Debug)]
pub struct Attribute<'a> {
    name: &'a str,
    parent: Option<u32>,
    place: u32,
    kind: u8,
    value: Value<'a>,
}

impl<'a> Attribute<'a> {
    /// The key.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The number of its module; none in metadata.
    pub fn parent(&self) -> Option<u32> {
        self.parent
    }

    /// Its place among the module's children of every kind.
    pub fn place(&self) -> u32 {
        self.place
    }

    /// The code of the value's type, or of its items' type, in FORMAT.md's table ValueType.
    pub fn value_type(&self) -> u8 {
        self.kind
    }

    /// The value.
    pub fn value(&self) -> Value<'a> {
        self.value
    }
}

/// A value of an attribute or of metadata.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// Python's `None`.
    Nil,
    /// Yes or no.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// An integer past those of i64.
    Uint(u64),
    /// A float.
    Float(f64),
    /// Text; it may hold NUL.
    Text(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// Values of one type.
    List(Items<'a>),
    /// Values of one type.
    Tuple(Items<'a>),
}

/// The items of a list or tuple.
#[derive(Clone, Copy)]
pub struct Items<'a> {
    archive: Archive<'a>,
    kind: u8,
    words: &'a [u8],
}

impl fmt::Debug for Items<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(*self).finish()
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<Value<'a>, Error>;

    fn next(&mut self) -> Option<Result<Value<'a>, Error>> {
        let word = u64_at(self.words, 0)?;
        self.words = self.words.get(8..)?;
        Some(self.archive.value(self.kind, word))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.words.len() / 8, Some(self.words.len() / 8))
    }
}

/// Tensors, each checked as it comes.
pub struct Tensors<'s, 'a> {
    archive: &'s Archive<'a>,
    next: u32,
    end: u32,
    order: Option<&'a [u8]>,
}

impl<'a> Iterator for Tensors<'_, 'a> {
    type Item = Result<Tensor<'a>, Error>;

    fn next(&mut self) -> Option<Result<Tensor<'a>, Error>> {
        if self.next >= self.end {
            return None;
        }
        let at = self.next;
        self.next = at.wrapping_add(1);
        let number = match self.order {
            None => at,
            Some(order) => u32_at(order, u64::from(at).wrapping_mul(4)).unwrap_or(NONE),
        };
        Some(self.archive.tensor(number))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end.saturating_sub(self.next) as usize;
        (left, Some(left))
    }
}

/// The modules directly in one, in pre-order.
pub struct Modules<'s, 'a> {
    archive: &'s Archive<'a>,
    next: u32,
    end: u32,
}

impl<'a> Modules<'_, 'a> {
    /// The number of the next one, without reading its names.
    fn step(&mut self) -> Option<u32> {
        let number = self.next;
        if number >= self.end {
            return None;
        }
        let row = self.archive.module_row(number)?;
        self.next = field32(row, 24).max(number.saturating_add(1)); // forward, whatever an unverified archive says
        Some(number)
    }

    fn walk(mut self) -> u32 {
        let mut count = 0u32;
        while self.step().is_some() {
            count = count.wrapping_add(1);
        }
        count
    }
}

impl<'a> Iterator for Modules<'_, 'a> {
    type Item = Result<Module<'a>, Error>;

    fn next(&mut self) -> Option<Result<Module<'a>, Error>> {
        let number = self.step()?;
        Some(self.archive.module(number))
    }
}

/// Attributes of a module, or metadata.
pub struct Attributes<'s, 'a> {
    archive: &'s Archive<'a>,
    rows: &'a [u8],
    next: u32,
    end: u32,
}

impl<'a> Iterator for Attributes<'_, 'a> {
    type Item = Result<Attribute<'a>, Error>;

    fn next(&mut self) -> Option<Result<Attribute<'a>, Error>> {
        if self.next >= self.end {
            return None;
        }
        let number = self.next;
        self.next = number.wrapping_add(1);
        Some(self.archive.read_attribute(self.rows, number))
    }
}

/// A child of a module.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant)] // without an allocator there is no box
pub enum Child<'a> {
    /// A tensor.
    Tensor(Tensor<'a>),
    /// A module.
    Module(Module<'a>),
    /// An attribute.
    Attribute(Attribute<'a>),
}

/// The children of a module in the order of their places.
pub struct Children<'s, 'a> {
    archive: &'s Archive<'a>,
    codes: &'s [u32], // a tensor's number; past those an attribute's; past those a module's
    next: usize,
}

impl<'a> Iterator for Children<'_, 'a> {
    type Item = Result<Child<'a>, Error>;

    fn next(&mut self) -> Option<Result<Child<'a>, Error>> {
        let code = *self.codes.get(self.next)?;
        self.next = self.next.wrapping_add(1);
        let archive = self.archive;
        Some(match code.checked_sub(archive.tensor_count()) {
            None => archive.tensor(code).map(Child::Tensor),
            Some(code) => match code.checked_sub(archive.attribute_count()) {
                None => archive.read_attribute(archive.attributes, code).map(Child::Attribute),
                Some(number) => archive.module(number).map(Child::Module),
            },
        })
    }
}

// Verification: what the rules marked [index] and [full] say. Every pass is linear in the index, but for sorting
// modules and attributes by name: n log n, and the budget (R30) bounds what all names together cost to compare.

/// Bits in scratch words.
struct Bits<'s>(&'s mut [u32]);

impl<'s> Bits<'s> {
    fn new(scratch: &'s mut [u32], bits: u32) -> Result<Bits<'s>, Error> {
        let words = scratch.get_mut(..words_of(bits)).ok_or(Error::ScratchTooSmall)?;
        words.fill(0);
        Ok(Bits(words))
    }

    /// Sets a bit; returns whether it was set before, or there is none.
    fn set(&mut self, bit: u32) -> bool {
        match self.0.get_mut((bit >> 5) as usize) {
            None => true,
            Some(word) => {
                let before = *word;
                *word |= 1 << (bit & 31);
                *word == before
            }
        }
    }
}

fn words_of(bits: u32) -> usize {
    (bits / 32) as usize + usize::from(bits % 32 != 0)
}

/// Sorts by merging, with as much room again: however chosen, names are compared log2(n) times each at the most.
fn sort(items: &mut [u32], room: &mut [u32], less: impl Fn(u32, u32) -> bool) {
    let (mut from, mut to) = (items, room);
    let size = from.len();
    let (mut width, mut turned) = (1usize, false);
    while width < size {
        let mut low = 0usize;
        while low < size {
            let middle = low.saturating_add(width).min(size);
            let high = middle.saturating_add(width).min(size);
            merge(from, to, (low, middle, high), &less);
            low = high;
        }
        core::mem::swap(&mut from, &mut to);
        turned = !turned;
        width = width.saturating_mul(2);
    }
    if turned {
        to.iter_mut().zip(from.iter()).for_each(|(to, from)| *to = *from);
    }
}

fn merge(from: &[u32], to: &mut [u32], (low, middle, high): (usize, usize, usize), less: &impl Fn(u32, u32) -> bool) {
    let (mut left, mut right) = (low, middle);
    for slot in to.iter_mut().take(high).skip(low) {
        let a = from.get(left).filter(|_| left < middle);
        let b = from.get(right).filter(|_| right < high);
        let take_right = match (a, b) {
            (Some(&a), Some(&b)) => less(b, a),
            (None, _) => true,
            (_, None) => false,
        };
        let taken = if take_right { b } else { a };
        *slot = taken.copied().unwrap_or(0);
        if take_right {
            right = right.wrapping_add(1);
        } else {
            left = left.wrapping_add(1);
        }
    }
}

impl<'a> Archive<'a> {
    /// How many words of scratch [`Archive::verify`] and [`Archive::verify_payloads`] need: 2 for each module and
    /// attribute, or one bit for each child of a module, or two for each payload, whichever is most.
    pub fn scratch_words(&self) -> usize {
        let named = self.named();
        let bits = words_of(self.tensor_count().saturating_add(named));
        let payloads = words_of(self.payload_count());
        (named as usize).saturating_mul(2).max(bits).max(payloads.saturating_mul(2))
    }

    /// How many names must be told apart: of all modules but the record, and of attributes.
    fn named(&self) -> u32 {
        self.module_count().saturating_sub(1).saturating_add(self.attribute_count())
    }

    /// Checks every rule of the index and its CRC: what Python's `verify="index"` accepts, this does.
    pub fn verify(&self, scratch: &mut [u32]) -> Result<(), Error> {
        ensure(scratch.len() >= self.scratch_words(), Error::ScratchTooSmall)?;
        let index = part(self.data, self.header.index_offset, self.header.index_size).unwrap_or(&[]);
        ensure(crc32(index) == self.header.index_crc, Error::IndexCrc)?;
        ensure(str::from_utf8(self.text).is_ok(), Error::Utf8)?;
        self.check_budget()?;
        for number in 0..self.payload_count() {
            self.payload(number)?;
        }
        for tensor in self.iter() {
            tensor?;
        }
        self.check_names()?;
        self.check_modules()?;
        self.check_values()?;
        self.check_children(scratch)?;
        self.check_full_names()?;
        self.check_collisions(scratch)?;
        self.check_usage(scratch)
    }

    /// The sizes of a column of spans.
    fn span_bytes(&self, rows: &[u8], item: u64, at: u64) -> u64 {
        let size = |i: u32| u64::from(field32(rows, u64::from(i).wrapping_mul(item).wrapping_add(at)));
        (0..count_of(rows, item)).fold(0, |sum: u64, i| sum.saturating_add(size(i)))
    }

    /// Spans and lists take no more than 16 times the index of their pools, an item 16 bytes (R30, R31, R67).
    fn check_budget(&self) -> Result<(), Error> {
        let most = self.header.index_size.saturating_mul(INDEX_ALLOWANCE);
        let mut total = self.span_bytes(self.tensors, TENSOR, 4);
        total = total.saturating_add(self.span_bytes(self.modules, MODULE, 4));
        total = total.saturating_add(self.span_bytes(self.modules, MODULE, 12));
        let pool = u64::from(count_of(self.words, 8));
        for row in rows_of(self.attributes).chain(rows_of(self.metadata)) {
            total = total.saturating_add(u64::from(field32(row, 4)));
            if field8(row, 25) != 0 {
                let (start, count) = halves(field64(row, 8));
                let (start, count) = (u64::from(start), u64::from(count));
                ensure(start.wrapping_add(count) <= pool, Error::List)?;
                total = total.saturating_add(count.wrapping_mul(16));
            }
            ensure(total <= most, Error::Budget)?; // before the items are looked at
            if field8(row, 24) == TEXT {
                total = self.words_of_value(row).fold(total, |sum, word| sum.saturating_add(word >> 32));
            }
        }
        ensure(total <= most, Error::Budget)
    }

    /// The words of a value: its own, or those of its items.
    fn words_of_value(&self, row: &[u8; 32]) -> impl Iterator<Item = u64> + 'a {
        let word = field64(row, 8);
        let (start, count) = halves(word);
        let list = field8(row, 25) != 0;
        let (start, count) = (u64::from(start).wrapping_mul(8), u64::from(count).wrapping_mul(8));
        let items = if list { part(self.words, start, count).unwrap_or(&[]) } else { &[] };
        Some(word).filter(|_| !list).into_iter().chain(U64s(items))
    }

    /// `by_name` is every tensor once, names strictly ascending (R32); names themselves are checked.
    fn check_names(&self) -> Result<(), Error> {
        let mut before: &[u8] = &[]; // less than any name
        for i in 0..self.tensor_count() {
            let number = field32(self.by_name, u64::from(i).wrapping_mul(4));
            let row = self.tensor_row(number).map_err(|_| Error::NameOrder)?;
            let name = part(self.text, u64::from(row.name.0), u64::from(row.name.1)).ok_or(Error::Span)?;
            ensure(before < name, Error::NameOrder)?;
            before = name;
        }
        Ok(())
    }

    /// Modules are named, in pre-order, nested, no deeper than 100 (R26 to R29, R37 to R41).
    fn check_modules(&self) -> Result<(), Error> {
        let count = self.module_count();
        let (mut depth, mut before) = (0u32, 0u32);
        for number in 0..count {
            let module = self.module(number)?;
            let row = self.module_row(number).ok_or(Error::Root)?;
            let reserved = u32::from(field8(row, 41)) | u32::from(u16_at(row, 42).unwrap_or(0)) | field32(row, 44);
            ensure(reserved == 0, Error::Reserved)?;
            ensure(module.kind.0 != 0, Error::ModuleKind)?;
            let parent = match (number, module.parent) {
                (0, None) => {
                    let whole = module.end == count && module.key_size == 0 && module.place == 0;
                    ensure(whole && module.name.is_empty(), Error::Root)?;
                    continue;
                }
                (0, _) => return Err(Error::Root),
                (_, parent) => parent.filter(|&p| p < number).ok_or(Error::ModuleRange)?,
            };
            let parent_end = self.module_end(parent);
            ensure(number < module.end && module.end <= parent_end, Error::ModuleRange)?;
            ensure(number.wrapping_add(1) >= module.end || self.parent_of(number.wrapping_add(1)) == number,
                Error::ModuleOrder)?;
            ensure(module.end >= parent_end || self.parent_of(module.end) == parent, Error::ModuleOrder)?;
            while before != parent {
                ensure(before > parent, Error::ModuleOrder)?; // up from the one before, to where this one hangs
                before = self.parent_of(before);
                depth = depth.saturating_sub(1);
            }
            (before, depth) = (number, depth.saturating_add(1));
            ensure(depth < MAX_DEPTH, Error::Depth)?;
        }
        Ok(())
    }

    fn module_end(&self, number: u32) -> u32 {
        self.module_row(number).map_or(0, |row| field32(row, 24))
    }

    fn parent_of(&self, number: u32) -> u32 {
        self.module_row(number).map_or(NONE, |row| field32(row, 20))
    }

    /// Attributes ascend, metadata too, values are of known kinds and in their pools (R26 to R29, R64 to R68).
    fn check_values(&self) -> Result<(), Error> {
        let mut before = None;
        for (row, attribute) in rows_of(self.attributes).zip(self.attributes()) {
            self.check_value(row)?;
            let attribute = attribute?;
            let parent = attribute.parent.filter(|&p| p < self.module_count()).ok_or(Error::AttributeOrder)?;
            let now = Some((parent, attribute.place));
            ensure(before < now, Error::AttributeOrder)?;
            before = now;
        }
        let mut last = "";
        for (row, attribute) in rows_of(self.metadata).zip(self.metadata()) {
            self.check_value(row)?;
            let attribute = attribute?;
            let plain = attribute.parent.is_none() && attribute.place == 0;
            ensure(plain && last < attribute.name, Error::MetadataOrder)?;
            last = attribute.name;
        }
        Ok(())
    }

    fn check_value(&self, row: &[u8; 32]) -> Result<(), Error> {
        ensure(u16_at(row, 26) == Some(0) && field32(row, 28) == 0, Error::Reserved)?;
        let kind = field8(row, 24);
        for word in self.words_of_value(row) {
            self.value(kind, word)?;
        }
        Ok(())
    }

    fn own_parent(&self, position: u32) -> Result<(u32, u32), Error> {
        let number = match self.by_module {
            None => position,
            Some(order) => field32(order, u64::from(position).wrapping_mul(4)),
        };
        Ok((self.tensor_row(number).map_err(|_| Error::ModuleTensors)?.parent, number))
    }

    /// `by_module`, first_tensor, first_attribute and places agree with the children (R42 to R44).
    fn check_children(&self, scratch: &mut [u32]) -> Result<(), Error> {
        let mut before = None;
        for position in 0..self.tensor_count() {
            let now = Some(self.own_parent(position)?);
            ensure(before < now, Error::ModuleTensors)?;
            before = now;
        }
        let (mut tensor, mut attribute) = (0u32, 0u32);
        for number in 0..self.module_count() {
            let row = self.module_row(number).ok_or(Error::Root)?;
            ensure(field32(row, 32) == tensor && field32(row, 36) == attribute, Error::FirstChild)?;
            let (first_tensor, first_attribute) = (tensor, attribute);
            while tensor < self.tensor_count() && self.own_parent(tensor)?.0 == number {
                tensor = tensor.wrapping_add(1);
            }
            while attribute < self.attribute_count() && self.attribute_field(attribute, 16) == number {
                attribute = attribute.wrapping_add(1);
            }
            self.check_places(number, (first_tensor, tensor), (first_attribute, attribute), scratch)?;
        }
        Ok(())
    }

    fn attribute_field(&self, number: u32, at: u64) -> u32 {
        field32(self.attributes, u64::from(number).wrapping_mul(ATTRIBUTE).wrapping_add(at))
    }

    /// The places of one module's children are 0, 1, 2, ... once each (R44).
    fn check_places(&self, number: u32, own: Span, attributes: Span, scratch: &mut [u32]) -> Result<(), Error> {
        let inner = || Modules { archive: self, next: number.wrapping_add(1), end: self.module_end(number) };
        let mut count = inner().walk();
        count = count.wrapping_add(own.1.wrapping_sub(own.0)).wrapping_add(attributes.1.wrapping_sub(attributes.0));
        let mut taken = Bits::new(scratch, count)?;
        let mut take_place = |place: u32| ensure(place < count && !taken.set(place), Error::Places);
        for position in own.0..own.1 {
            take_place(self.tensor_row(self.own_parent(position)?.1)?.place)?;
        }
        for attribute in attributes.0..attributes.1 {
            take_place(self.attribute_field(attribute, 20))?;
        }
        let mut modules = inner();
        while let Some(module) = modules.step() {
            take_place(self.module_row(module).map_or(NONE, |row| field32(row, 28)))?;
        }
        Ok(())
    }

    /// A full name is the module's name, a dot and the key; in module 0 the key alone (R33, R34).
    fn check_full_names(&self) -> Result<(), Error> {
        for number in 0..self.tensor_count() {
            let row = self.tensor_row(number)?;
            self.check_full_name(row.name, row.key_size, row.parent)?;
        }
        for number in 1..self.module_count() {
            let row = self.module_row(number).ok_or(Error::Root)?;
            self.check_full_name((field32(row, 0), field32(row, 4)), field32(row, 16), field32(row, 20))?;
        }
        Ok(())
    }

    fn check_full_name(&self, name: Span, key_size: u32, parent: u32) -> Result<(), Error> {
        ensure(key_size != 0 && key_size <= name.1, Error::KeySize)?;
        let head = part(self.text, u64::from(name.0), u64::from(name.1.wrapping_sub(key_size)));
        let fits = match (parent, head.and_then(<[u8]>::split_last)) {
            (0, head) => head.is_none(),
            (_, Some((b'.', prefix))) => prefix == self.module_name(parent),
            _ => false,
        };
        ensure(fits, Error::FullName)
    }

    fn module_name(&self, number: u32) -> &'a [u8] {
        let span = self.module_row(number).map_or((0, 0), |row| (field32(row, 0), field32(row, 4)));
        part(self.text, u64::from(span.0), u64::from(span.1)).unwrap_or(&[])
    }

    /// The parent and key of a child that has no order of its own: a module, or past the modules an attribute.
    fn named_key(&self, code: u32) -> (u32, &'a [u8]) {
        let (parent, start, size) = match code.checked_sub(self.module_count()) {
            Some(number) => {
                let at = |at| self.attribute_field(number, at);
                (at(16), u64::from(at(0)), at(4))
            }
            None => {
                let row = self.module_row(code).unwrap_or(&[0; 48]);
                let size = field32(row, 16);
                let tail = field32(row, 4).saturating_sub(size);
                (field32(row, 20), u64::from(field32(row, 0)).wrapping_add(u64::from(tail)), size)
            }
        };
        (parent, part(self.text, start, u64::from(size)).unwrap_or(&[]))
    }

    /// No two modules share a full name; in a module no two children share a key (R35, R36).
    fn check_collisions(&self, scratch: &mut [u32]) -> Result<(), Error> {
        let named = self.named() as usize;
        if named == 0 {
            return Ok(()); // tensors alone: `by_name` has shown their names to be unique
        }
        if scratch.len() < named {
            return Err(Error::ScratchTooSmall);
        }
        let (items, room) = scratch.split_at_mut(named);
        let inner = (self.module_count().saturating_sub(1) as usize).min(named);
        let modules = items.get_mut(..inner).ok_or(Error::ScratchTooSmall)?;
        modules.iter_mut().zip(1..).for_each(|(slot, number)| *slot = number);
        sort(modules, room.get_mut(..inner).ok_or(Error::ScratchTooSmall)?, |a, b| {
            self.module_name(a) < self.module_name(b)
        });
        ensure(distinct(modules, |a, b| self.module_name(a) == self.module_name(b)), Error::ModuleTwice)?;
        items.iter_mut().zip(1..).for_each(|(slot, code)| *slot = code);
        sort(items, room.get_mut(..named).ok_or(Error::ScratchTooSmall)?, |a, b| self.named_key(a) < self.named_key(b));
        ensure(distinct(items, |a, b| self.named_key(a) == self.named_key(b)), Error::KeyTwice)?;
        for number in 0..self.tensor_count() {
            let row = self.tensor_row(number)?;
            let tail = u64::from(row.name.0).wrapping_add(u64::from(row.name.1.saturating_sub(row.key_size)));
            let key = part(self.text, tail, u64::from(row.key_size)).ok_or(Error::KeySize)?;
            let found = items.binary_search_by(|&code| self.named_key(code).cmp(&(row.parent, key)));
            ensure(found.is_err(), Error::KeyTwice)?;
        }
        Ok(())
    }

    /// Every payload belongs to something (R61).
    fn check_usage(&self, scratch: &mut [u32]) -> Result<(), Error> {
        let count = self.payload_count();
        let mut used = Bits::new(scratch, count)?;
        let mut total = 0u32;
        let mut mark = |number: u32| {
            if number < count && !used.set(number) {
                total = total.wrapping_add(1);
            }
        };
        for number in 0..self.tensor_count() {
            mark(self.tensor_row(number)?.payload);
        }
        for row in rows_of(self.attributes).chain(rows_of(self.metadata)).filter(|row| field8(*row, 24) == BYTES) {
            self.words_of_value(row).for_each(|word| mark(u32::try_from(word).unwrap_or(NONE)));
        }
        ensure(total == count, Error::PayloadUnused)
    }

    /// [`Archive::verify`], then every byte of the payloads: what Python's `verify="full"` accepts, this does.
    pub fn verify_payloads(&self, scratch: &mut [u32]) -> Result<(), Error> {
        self.verify(scratch)?;
        let (mut done, end) = self.header.payload_region();
        let mut last = (0, 0);
        for number in 0..self.payload_count() {
            let (offset, nbytes, digest) = self.range(number).ok_or(Error::PayloadNumber)?;
            if (offset, nbytes) == last {
                continue; // equal ranges have equal digests
            }
            last = (offset, nbytes);
            let (payload, at) = self.payload(number)?;
            self.check_gap(done, at)?;
            done = at.wrapping_add(nbytes);
            ensure(self.digest_kind == 0 || xxh3(payload) == digest, Error::Digest)?;
        }
        self.check_gap(done, end)?;
        self.check_elements(scratch)
    }

    fn check_gap(&self, start: u64, end: u64) -> Result<(), Error> {
        ensure(part(self.data, start, end.saturating_sub(start)).map_or(false, is_zero), Error::Gap)
    }

    /// Pad bits are zero, bools 0 or 1, string ends right (R70 to R72); no bytes are read again for each tensor.
    fn check_elements(&self, scratch: &mut [u32]) -> Result<(), Error> {
        let payloads = self.payload_count();
        let (first, second) = scratch.split_at_mut(words_of(payloads).min(scratch.len()));
        let (mut strings, mut bools) = (Bits::new(first, payloads)?, Bits::new(second, payloads)?);
        for number in 0..self.tensor_count() {
            let tensor = self.tensor(number)?;
            if tensor.count == 0 {
                continue;
            }
            let payload = self.first_alike(self.tensor_row(number)?.payload);
            if tensor.dtype.0 == STRING {
                tensor.check_strings(|| strings.set(payload))?;
            } else if tensor.dtype == DType::BOOL {
                // of the whole payload: its views may be very many
                ensure(bools.set(payload) || tensor.payload.iter().all(|&b| b <= 1), Error::Bool)?;
            } else if tensor.bits < 8 && tensor.dtype.bits().is_some() {
                let used = tensor.count.wrapping_mul(u64::from(tensor.bits)) & 7;
                let last = tensor.payload.last().copied().unwrap_or(0);
                ensure(used == 0 || last >> used == 0, Error::PadBits)?;
            }
        }
        Ok(())
    }

    /// The number of the first payload of the very same range: neighbours, and payloads ascend by offset.
    fn first_alike(&self, number: u32) -> u32 {
        let offset = |number| self.range(number).map_or(0, |(offset, _, _)| offset);
        let (mut low, mut high, wanted) = (0, number, offset(number));
        while low < high {
            let middle = low.wrapping_add(high.wrapping_sub(low) >> 1);
            if offset(middle) < wanted {
                low = middle.wrapping_add(1);
            } else {
                high = middle;
            }
        }
        low
    }
}

/// The rows of attributes or metadata.
fn rows_of(rows: &[u8]) -> impl Iterator<Item = &[u8; 32]> {
    rows.chunks_exact(32).filter_map(|row| row.try_into().ok())
}

fn distinct(items: &[u32], same: impl Fn(u32, u32) -> bool) -> bool {
    items.iter().zip(items.iter().skip(1)).all(|(&a, &b)| !same(a, b))
}

// XXH3, 64 bits, seed 0; the constants are the algorithm's.

const PRIME32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
const PRIME64: [u64; 5] = [
    0x9E37_79B1_85EB_CA87,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x27D4_EB2F_1656_67C5,
];
const SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

#[inline(always)]
fn secret(at: u64) -> u64 {
    field64(&SECRET, at)
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a).wrapping_mul(u128::from(b));
    product as u64 ^ (product >> 64) as u64
}

fn avalanche(mut h: u64) -> u64 {
    h ^= h >> 37;
    h = h.wrapping_mul(0x1656_6791_9E37_79F9);
    h ^ h >> 32
}

fn short_avalanche(mut h: u64) -> u64 {
    h ^= h >> 33;
    h = h.wrapping_mul(PRIME64[1]);
    h ^= h >> 29;
    h = h.wrapping_mul(PRIME64[2]);
    h ^ h >> 32
}

fn mix(bytes: &[u8], at: u64, key: u64) -> u64 {
    let (low, high) = (field64(bytes, at), field64(bytes, at.wrapping_add(8)));
    fold(low ^ secret(key), high ^ secret(key.wrapping_add(8)))
}

/// XXH3 of 64 bits with seed 0: the digest of payloads.
pub fn xxh3(bytes: &[u8]) -> u64 {
    let size = size_of(bytes);
    match size {
        0 => short_avalanche(secret(56) ^ secret(64)),
        1..=3 => {
            let at = |at| u32::from(field8(bytes, at));
            let last = at(size.wrapping_sub(1));
            let word = at(0) << 16 | at(size / 2) << 24 | last | (size as u32) << 8;
            short_avalanche(u64::from(word) ^ u64::from(field32(&SECRET, 0) ^ field32(&SECRET, 4)))
        }
        4..=8 => {
            let (first, last) = (field32(bytes, 0), field32(bytes, size.wrapping_sub(4)));
            let mut h = (u64::from(last) | u64::from(first) << 32) ^ secret(8) ^ secret(16);
            h ^= h.rotate_left(49) ^ h.rotate_left(24);
            h = h.wrapping_mul(0x9FB2_1C65_1E98_DF25);
            h ^= (h >> 35).wrapping_add(size);
            h = h.wrapping_mul(0x9FB2_1C65_1E98_DF25);
            h ^ h >> 28
        }
        9..=16 => {
            let low = field64(bytes, 0) ^ secret(24) ^ secret(32);
            let high = field64(bytes, size.wrapping_sub(8)) ^ secret(40) ^ secret(48);
            avalanche(size.wrapping_add(low.swap_bytes()).wrapping_add(high).wrapping_add(fold(low, high)))
        }
        17..=128 => {
            let mut h = size.wrapping_mul(PRIME64[0]);
            for pair in (0..size.wrapping_add(31) / 32).rev() {
                let (at, key) = (pair.wrapping_mul(16), pair.wrapping_mul(32));
                h = h.wrapping_add(mix(bytes, at, key));
                h = h.wrapping_add(mix(bytes, size.wrapping_sub(16).wrapping_sub(at), key.wrapping_add(16)));
            }
            avalanche(h)
        }
        129..=240 => {
            let mut h = size.wrapping_mul(PRIME64[0]);
            for i in 0..size / 16 {
                let at = i.wrapping_mul(16);
                if i == 8 {
                    h = avalanche(h);
                }
                let key = if i < 8 { at } else { at.wrapping_sub(125) };
                h = h.wrapping_add(mix(bytes, at, key));
            }
            if size < 144 {
                h = avalanche(h);
            }
            avalanche(h.wrapping_add(mix(bytes, size.wrapping_sub(16), 119)))
        }
        _ => xxh3_long(bytes),
    }
}

fn xxh3_long(bytes: &[u8]) -> u64 {
    let mut acc = [
        PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4], PRIME32[0],
    ];
    let size = size_of(bytes);
    let stripes = size.wrapping_sub(1) / 64; // the last one is taken from the end
    for (number, stripe) in bytes.chunks_exact(64).take(stripes as usize).enumerate() {
        accumulate(&mut acc, stripe, (number as u64 & 15) << 3);
        if number & 15 == 15 && (number as u64).wrapping_add(1).wrapping_mul(64) < size {
            scramble(&mut acc);
        }
    }
    accumulate(&mut acc, part(bytes, size.wrapping_sub(64), 64).unwrap_or(&[]), 121);
    let mut h = size.wrapping_mul(PRIME64[0]);
    for i in 0..4usize {
        let key = (i as u64).wrapping_mul(16).wrapping_add(11);
        let pair = (acc[(i * 2) & 7] ^ secret(key), acc[(i * 2 + 1) & 7] ^ secret(key.wrapping_add(8)));
        h = h.wrapping_add(fold(pair.0, pair.1));
    }
    avalanche(h)
}

#[inline(always)]
fn accumulate(acc: &mut [u64; 8], stripe: &[u8], key: u64) {
    let keys = part(&SECRET, key, 64).unwrap_or(&[]);
    for (lane, (data, key)) in U64s(stripe).zip(U64s(keys)).enumerate() {
        let mixed = data ^ key;
        acc[(lane ^ 1) & 7] = acc[(lane ^ 1) & 7].wrapping_add(data);
        acc[lane & 7] = acc[lane & 7].wrapping_add((mixed & 0xFFFF_FFFF).wrapping_mul(mixed >> 32));
    }
}

fn scramble(acc: &mut [u64; 8]) {
    for (lane, key) in acc.iter_mut().zip(U64s(part(&SECRET, 128, 64).unwrap_or(&[]))) {
        *lane = (*lane ^ *lane >> 47 ^ key).wrapping_mul(PRIME32[0]);
    }
}
