// A tensor of an archive that is mapped, by code that flatc generates: find MODEL.zcr NAME prints its shape and the
// first of its numbers, float32. The file is trusted: generated.cpp beside it checks more.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <string_view>

#include "zcrecord_generated.h"

int main(int, char** arguments) {
  struct stat status;
  const int file = open(arguments[1], O_RDONLY);
  if (file < 0 || fstat(file, &status) != 0 || status.st_size < 128) return 1;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return 1;

  const auto* archive = static_cast<const unsigned char*>(mapped);
  const auto* trailer = reinterpret_cast<const std::uint64_t*>(archive + size - 64);
  const std::uint64_t index_offset = trailer[3], index_size = trailer[4], payload_offset = trailer[5];
  if (trailer[6] != size || index_offset > size || index_size > size - index_offset) return 1;
  flatbuffers::Verifier verifier(archive + index_offset, index_size);
  if (!zcrecord::VerifyRecordBuffer(verifier)) return 1;
  const zcrecord::Record& record = *zcrecord::GetRecord(archive + index_offset);

  const std::string_view text(reinterpret_cast<const char*>(record.text()->data()), record.text()->size());
  for (const zcrecord::Tensor* tensor : *record.tensors()) {
    if (text.substr(tensor->name().start(), tensor->name().size()) != arguments[2]) continue;
    const std::uint64_t at = payload_offset + record.payloads()->Get(tensor->payload())->offset();
    for (unsigned i = 0; i < tensor->rank(); ++i)
      std::printf("%llu ", static_cast<unsigned long long>(record.dims()->Get(tensor->dims() + i)));
    std::printf("%g\n", *reinterpret_cast<const float*>(archive + at + tensor->byte_offset()));
    return 0;
  }
  return 1;
}
