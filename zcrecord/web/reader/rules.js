// SPDX-License-Identifier: 0BSD
/** Error messages for archives that break a rule of FORMAT.md: loaded when one does. */

import { FormatError, IntegrityError, LimitError, VersionError } from "./format.js";

const BREACHES = new Map(`\
1 not a zcrecord archive, or cut off: its magic is missing
2 format version # is not known; of a draft, version 0, \`zcrecord convert\` makes version 1
3 its CRC does not match
4 its alignment is outside 2^4 to 2^16
5 its base alignment is outside its alignment to 2^16
6 its reserved bytes are not zero
7 it needs features (bits #) that are not known
8 header and trailer differ, or the trailer is not sealed
9 archive_size is more than 2^56
10 index_size is not a multiple of 8 from 8 to 2^31 - 8
11 payload_offset is unaligned or past the end
12 header, index, payloads and trailer do not tile the archive
13 they do not end where their region does
14 the source has # bytes, its archive_size is another: it is truncated, or other bytes follow it
15 not sealed, or larger than the # bytes of the source; open the whole file
16 no archive of up to # bytes ends here
17 its CRC does not match
19 its identifier is not 'ZCR1', or its root table is outside it
20 its vtable or table is unaligned or outside it
21 field # lies outside its table
22 it is unaligned or leaves the index
24 it has not one item for each tensor
25 digest kind # is not known
26 a reserved field is not zero
27 its text leaves the pool, or is not followed by NUL
28 its text is not UTF-8, or starts inside a character
29 its name is empty or contains NUL
30 names, texts and lists up to here take more than 16 times the index of their pools
32 it is no tensor, or names do not strictly ascend here
33 its key is empty or longer than its name
34 its name is not its module's name, a dot and its key
35 its name is there twice
36 its key is there twice in its module
37 module 0 is missing, has a name, parent or place, or not all modules
38 its parent does not come before it, or ends before it
39 it is not in pre-order
40 it is nested more than 100 deep
41 kind 0 is invalid
42 it is no tensor, or not ascending by (parent, tensor)
43 its first_tensor or first_attribute is wrong
44 its place is taken already, or leaves others empty
45 its parent is no module
46 its dtype cannot take that many bits an element
47 its rank is more than 64
48 its dims leave their pool
49 its shape claims more than 2^56 bytes
50 it has no payload of the index though it has bytes, or one though it has none
51 its shape takes other bytes than its payload has
52 its strides leave their pool, or its type can have none
53 its strides reach outside its payload
54 its byte_offset is no multiple of its element size
55 its shape claims more bytes than its payload has
56 it is empty, or leaves the region of payloads
57 it is not aligned
58 it overlaps the one before it, or is out of order
59 it comes after a hole
60 its digest is not that of the same range, or there for no reason
61 no tensor and no attribute uses it
64 its parent is no module, or it does not ascend by (parent, place)
65 it has a parent or place, or does not ascend by name
66 its type or form is not known
67 its list leaves the pool of words
68 its value is none of its type
71 its payload cannot hold its strings`.split("\n").map((line) => [parseInt(line, 10), line.replace(/\d+ /, "")]));

const ADVICE = new Map([
  [VersionError, "upgrade zcrecord.js"],
  [IntegrityError, "the file is damaged, copy it again"],
  [LimitError, "save it in parts"],
  [FormatError, "copy it again, or save it again if that does not help"],
]);

// Errors of rules whose breach is another one than FormatError.
const KIND = { 2: VersionError, 3: IntegrityError, 7: VersionError, 9: LimitError, 17: IntegrityError, 30: LimitError,
  40: LimitError, 47: LimitError, 49: LimitError };

// First characters of other files, and their kinds.
const OTHERS = [
  [/^\x28\xb5\x2f\xfd/, "is packed with Zstandard; unpack it first, with `zcrecord unpack`"],
  [/^\s*</, "looks like HTML or XML, a page in place of the archive; look at the URL"],
  [/^PK\x03\x04/, "looks like a zip file, as PyTorch and NumPy write them; convert it with `zcrecord convert`"],
  [/^GGUF/, "looks like GGUF; convert it with `zcrecord convert`"],
  [/^.{8}\{"/s, "looks like safetensors; convert it with `zcrecord convert`"],
  [/^\x08[\x01-\x20][\x12-\x42]/, "looks like an ONNX model; convert it with `onnx2zc`"],
];

/** Returns an error with a message and advice for one that has the number of a rule. */
export function explain({ where, rule, got, tensor }) {
  const Kind = KIND[rule] ?? FormatError;
  const start = rule === 1 ? String.fromCharCode(...got) : "";
  const other = OTHERS.find(([looks]) => looks.test(start));
  if (other) return new Kind(`not a zcrecord archive (R1): it ${other[1]}`);
  return new Kind(`${where}: ${BREACHES.get(rule).replace("#", got)} (R${rule}); ${ADVICE.get(Kind)}`, { tensor });
}
