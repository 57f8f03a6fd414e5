// A reader of archives made of what flatc generates from schema/zcrecord.fbs: a checker, as tests/support/readers.py has it.
//
// Header and trailer are 64 bytes that this file reads itself; the index is generated code's, after its own Verifier.
// That one knows vectors, and nothing of what their numbers mean: whatever is used as a position is compared here with
// what it is a position in. The rest of the rules are zcrecord.h's to check, and the Python package's.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "zcrecord_generated.h"

namespace {

constexpr std::uint32_t kNone = 0xFFFFFFFF;
constexpr std::uint64_t kEnd = 64;  // bytes of header and trailer
constexpr unsigned char kMagic[8] = {0x89, 'Z', 'C', 'R', '\r', '\n', 0x1A, '\n'};

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool holds, const char* otherwise) {
  if (!holds) throw Refused(otherwise);
}

std::uint32_t crc32(const unsigned char* data, std::uint64_t size) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (std::uint64_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

// -- header and trailer ----------------------------------------------------------------------------------------------

struct Header {
  unsigned alignment_log2, base_alignment_log2;
  std::uint64_t index_offset, index_size, payload_offset, archive_size;
  std::uint32_t index_crc;
  bool sealed;
};

Header read_header(const unsigned char* at) {
  const auto u32 = [at](int offset) { return flatbuffers::ReadScalar<std::uint32_t>(at + offset); };
  const auto u64 = [at](int offset) { return flatbuffers::ReadScalar<std::uint64_t>(at + offset); };
  require(std::memcmp(at, kMagic, sizeof kMagic) == 0, "the magic is missing");
  require(at[8] == 1, "another version");
  require(crc32(at, 60) == u32(60), "the CRC of header or trailer does not match");
  require(u64(16) == 0, "needs features that this reader does not know");
  require(at[9] <= 16 && at[10] <= 16, "an alignment of more than 2^16");
  return {at[9], at[10], u64(24), u64(32), u64(40), u64(48), u32(56), at[10] != 0};
}

// -- the archive -----------------------------------------------------------------------------------------------------

class Archive {
 public:
  // Opens `size` bytes that stay where they are: 'w' the whole of them, 'p' what starts there, 's' what ends there.
  Archive(const unsigned char* data, std::uint64_t size, char mode) : data_(data) {
    require(size >= 2 * kEnd, "too few bytes for an archive");
    if (mode == 's') {
      const Header trailer = read_header(data + size - kEnd);
      require(trailer.archive_size >= 2 * kEnd && trailer.archive_size <= size, "no archive ends here");
      data_ += size - trailer.archive_size;
      size = trailer.archive_size;
    }
    // Generated code reads numbers where they lie: for that they have to lie on multiples of their size.
    require(reinterpret_cast<std::uintptr_t>(data_) % 16 == 0, "does not lie on a multiple of 16");
    header_ = read_header(data_);
    if (mode == 'p') {
      require(header_.sealed && header_.archive_size <= size, "no sealed archive of that size starts here");
      size = header_.archive_size;
    }
    if (!header_.sealed) header_ = read_header(data_ + size - kEnd);
    require(header_.archive_size == size, "archive_size is not what is there");
    require(std::memcmp(data_ + size - kEnd, kMagic, sizeof kMagic) == 0, "the trailer is missing");
    require(read_header(data_ + size - kEnd).sealed, "the trailer is not sealed");
    take_index(size - kEnd);
  }

  const Header& header() const { return header_; }
  const zcrecord::Record& record() const { return *record_; }

  // The item of a vector that a number names.
  template <typename Vector>
  static auto at(const Vector* vector, std::uint64_t number) {
    require(number < count(vector), "a number is past the end of its vector");
    return vector->Get(static_cast<flatbuffers::uoffset_t>(number));
  }

  template <typename Vector>
  static std::uint64_t count(const Vector* vector) {
    return vector == nullptr ? 0 : vector->size();
  }

  std::string_view text(std::uint32_t start, std::uint32_t size) const {
    require(std::uint64_t{start} + size < count(record_->text()), "a span is past the end of the text");
    return {reinterpret_cast<const char*>(record_->text()->data()) + start, size};
  }

  std::string_view text(const zcrecord::Span& span) const { return text(span.start(), span.size()); }

  std::string_view name(const zcrecord::Tensor& tensor) const { return text(tensor.name()); }

  // The bytes of a payload, where they lie.
  std::basic_string_view<unsigned char> payload(std::uint32_t number) const {
    const zcrecord::Payload& payload = *at(record_->payloads(), number);
    const std::uint64_t most = header_.archive_size - header_.payload_offset;
    require(payload.offset() <= most && payload.nbytes() <= most - payload.offset(), "a payload leaves the archive");
    return {data_ + header_.payload_offset + payload.offset(), static_cast<std::size_t>(payload.nbytes())};
  }

  // Where a tensor's element [0, ..., 0] lies in the archive.
  std::uint64_t first_byte(const zcrecord::Tensor& tensor) const {
    require(tensor.byte_offset() < payload(tensor.payload()).size(), "a tensor leaves its payload");
    return header_.payload_offset + at(record_->payloads(), tensor.payload())->offset() + tensor.byte_offset();
  }

  // Which tensor has this name, or NONE: names ascend in by_name.
  std::uint32_t find(std::string_view wanted) const {
    std::uint64_t low = 0, high = count(record_->by_name());
    while (low < high) {
      const std::uint64_t middle = low + (high - low) / 2;
      const std::uint32_t number = at(record_->by_name(), middle);
      const int order = name(*at(record_->tensors(), number)).compare(wanted);
      if (order == 0) return number;
      if (order < 0) low = middle + 1;
      else high = middle;
    }
    return kNone;
  }

 private:
  void take_index(std::uint64_t end) {
    const Header& h = header_;
    require(h.index_offset <= end && h.index_size <= end - h.index_offset && h.payload_offset <= end &&
                h.index_offset % 16 == 0 && h.index_size < 0x80000000U,
            "index or payloads leave the archive");
    const unsigned char* index = data_ + h.index_offset;
    require(crc32(index, h.index_size) == h.index_crc, "the CRC of the index does not match");
    flatbuffers::Verifier verifier(index, static_cast<std::size_t>(h.index_size));
    require(zcrecord::VerifyRecordBuffer(verifier), "the index is no FlatBuffer of zcrecord.fbs");
    record_ = zcrecord::GetRecord(index);
  }

  const unsigned char* data_;
  Header header_{};
  const zcrecord::Record* record_ = nullptr;
};

// -- what it says, as tests/support/readers.py has it ------------------------------------------------------------------------

std::string hex(std::string_view data) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string out;
  for (const char c : data) {
    out += digits[static_cast<unsigned char>(c) >> 4];
    out += digits[static_cast<unsigned char>(c) & 15];
  }
  return out.empty() ? "-" : out;
}

std::string hex32(std::uint32_t value) {
  char out[9];
  std::snprintf(out, sizeof out, "%08x", static_cast<unsigned>(value));
  return out;
}

// The items [start, start + size) of a pool of numbers, with commas between.
template <typename Vector>
std::string numbers(const Vector* pool, std::uint32_t start, std::uint32_t size) {
  std::string out;
  for (std::uint64_t i = start; i < std::uint64_t{start} + size; ++i) {
    if (!out.empty()) out += ',';
    out += std::to_string(Archive::at(pool, i));
  }
  return out.empty() ? "-" : out;
}

std::string parent(std::uint32_t number) { return number == kNone ? "-" : std::to_string(number); }

std::string tensor_line(const Archive& archive, const zcrecord::Tensor& tensor) {
  const zcrecord::Record& record = archive.record();
  const std::string dims = numbers(record.dims(), tensor.dims(), tensor.rank());
  const std::string strides =
      tensor.strides() == kNone ? "c" : numbers(record.strides(), tensor.strides(), tensor.rank());
  std::string bytes = "- 0 00000000";
  if (tensor.payload() != kNone) {
    const auto payload = archive.payload(tensor.payload());
    bytes = std::to_string(archive.first_byte(tensor)) + ' ' + std::to_string(payload.size()) + ' ' +
            hex32(crc32(payload.data(), payload.size()));
  }
  return "tensor " + hex(archive.name(tensor)) + ' ' + std::to_string(tensor.dtype()) + ' ' +
         std::to_string(tensor.bits()) + ' ' + dims + ' ' + strides + ' ' + bytes + ' ' +
         std::to_string(tensor.parent()) + ' ' + std::to_string(tensor.place()) + ' ' +
         std::to_string(tensor.key_size()) + '\n';
}

std::string module_line(const Archive& archive, const zcrecord::Module& module) {
  return "module " + hex(archive.text(module.name())) + ' ' + std::to_string(module.kind()) + ' ' +
         hex(archive.text(module.type_name())) + ' ' + parent(module.parent()) + ' ' + std::to_string(module.end()) +
         ' ' + std::to_string(module.place()) + ' ' + std::to_string(module.key_size()) + '\n';
}

std::string word(const Archive& archive, zcrecord::ValueType type, std::uint64_t value) {
  const auto low = static_cast<std::uint32_t>(value), high = static_cast<std::uint32_t>(value >> 32);
  if (type == zcrecord::ValueType_TEXT) return hex(archive.text(low, high));
  if (type == zcrecord::ValueType_PAYLOAD)
    return value == kNone ? "0" : std::to_string(archive.payload(low).size());
  return std::to_string(value);
}

std::string attribute_line(const Archive& archive, const char* kind, const zcrecord::Attribute& attribute) {
  std::string words;
  if (attribute.form() == zcrecord::ValueForm_SCALAR) {
    words = word(archive, attribute.type(), attribute.value());
  } else {
    const auto start = static_cast<std::uint32_t>(attribute.value());
    const auto size = static_cast<std::uint32_t>(attribute.value() >> 32);
    for (std::uint64_t i = start; i < std::uint64_t{start} + size; ++i)
      words += (words.empty() ? "" : ",") + word(archive, attribute.type(), Archive::at(archive.record().words(), i));
  }
  return std::string(kind) + ' ' + parent(attribute.parent()) + ' ' + std::to_string(attribute.place()) + ' ' +
         hex(archive.text(attribute.name())) + ' ' + std::to_string(attribute.type()) + ' ' +
         std::to_string(attribute.form()) + ' ' + (words.empty() ? "-" : words) + '\n';
}

std::string dump(const Archive& archive) {
  const zcrecord::Record& record = archive.record();
  const Header& header = archive.header();
  std::string out = "archive " + std::to_string(1U << header.alignment_log2) + ' ' +
                    std::to_string(1U << header.base_alignment_log2) + ' ' + std::to_string(header.archive_size);
  for (const std::uint64_t n : {Archive::count(record.tensors()), Archive::count(record.modules()),
                                Archive::count(record.attributes()), Archive::count(record.metadata())})
    out += ' ' + std::to_string(n);
  out += '\n';
  for (std::uint64_t i = 0; i < Archive::count(record.tensors()); ++i) {
    const zcrecord::Tensor& tensor = *Archive::at(record.tensors(), i);
    require(archive.find(archive.name(tensor)) == i, "a tensor is not found by its name");
    out += tensor_line(archive, tensor);
  }
  require(archive.find("no such tensor") == kNone, "a tensor is found that is not there");
  for (std::uint64_t i = 0; i < Archive::count(record.modules()); ++i)
    out += module_line(archive, *Archive::at(record.modules(), i));
  for (std::uint64_t i = 0; i < Archive::count(record.attributes()); ++i)
    out += attribute_line(archive, "attribute", *Archive::at(record.attributes(), i));
  for (std::uint64_t i = 0; i < Archive::count(record.metadata()); ++i)
    out += attribute_line(archive, "metadata", *Archive::at(record.metadata(), i));
  return out;
}

}  // namespace

int main(int count, char** arguments) {
  const bool shown = count > 1 && std::strcmp(arguments[1], "--dump") == 0;
  unsigned char question[8];
  while (std::fread(question, 1, sizeof question, stdin) == sizeof question) {
    const auto size = flatbuffers::ReadScalar<std::uint32_t>(question + 4);
    // Memory of its own and of that size: a sanitizer notices a read past its end.
    const std::unique_ptr<unsigned char[]> data(new unsigned char[size]);
    if (std::fread(data.get(), 1, size, stdin) != size) return 2;
    try {
      const Archive archive(data.get(), size, static_cast<char>(question[0]));
      const std::string text = question[1] == 'o' ? "" : dump(archive);
      const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
      std::printf("accepted %s\n", hex32(crc32(bytes, text.size())).c_str());
      if (shown) std::printf("%s\n", text.c_str());
    } catch (const Refused& refused) {
      std::printf("refused %s\n", refused.what());
    }
  }
  return 0;
}
