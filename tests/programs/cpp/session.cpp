// ONNX Runtime from C++ over a model and its archive: session [-- NAME:TYPE:DIMS:FILE...]...
//
// Makes the session by the lines of zcrecord/onnx/README.md, which stand in session.inc. Each list of inputs is a run,
// whose first output goes to the file output0, output1 and so on. Prints ONNX Runtime's version, and by how many bytes
// private memory grew, as Linux tells it.

#include <onnxruntime_cxx_api.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kApi = 21;  // of the oldest ONNX Runtime that the package takes; the headers may be of a later one

const std::map<std::string, ONNXTensorElementDataType> kTypes = {
    {"float", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {"int64", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {"bool", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL},
};

struct Input {
  std::string name, bytes;
  std::vector<int64_t> dims;
  ONNXTensorElementDataType type;
};

Input read_input(const std::string& text) {
  std::istringstream parts(text);
  std::string name, type, dims, path, dim;
  std::getline(std::getline(std::getline(parts, name, ':'), type, ':'), dims, ':') >> path;
  std::ifstream file(path, std::ios::binary);
  Input made{name, {std::istreambuf_iterator<char>(file), {}}, {}, kTypes.at(type)};
  for (std::istringstream all(dims); std::getline(all, dim, 'x');) made.dims.push_back(std::stoll(dim));
  return made;
}

long private_bytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);)
    if (line.rfind("Anonymous:", 0) == 0) return std::stol(line.substr(10)) * 1024;
  return 0;
}

void run(Ort::Session& session, std::vector<Input>& inputs, const std::string& out) {
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<Ort::Value> values;
  std::vector<const char*> names;
  for (Input& input : inputs) {
    names.push_back(input.name.c_str());
    values.push_back(Ort::Value::CreateTensor(memory, input.bytes.data(), input.bytes.size(), input.dims.data(),
                                              input.dims.size(), input.type));
  }
  const auto output = session.GetOutputNameAllocated(0, Ort::AllocatorWithDefaultOptions());
  const char* wanted[] = {output.get()};
  const auto results = session.Run(Ort::RunOptions(), names.data(), values.data(), values.size(), wanted, 1);
  const auto nbytes = results[0].GetTensorTypeAndShapeInfo().GetElementCount() * sizeof(float);
  const auto* data = reinterpret_cast<const char*>(results[0].GetTensorData<float>());
  std::ofstream(out, std::ios::binary).write(data, static_cast<std::streamsize>(nbytes));
}

}  // namespace

int main(int count, char** arguments) {
  Ort::InitApi(OrtGetApiBase()->GetApi(kApi));
  const long before = private_bytes();
#include "session.inc"
  for (int at = 1, number = 0; at < count; ++number) {
    std::vector<Input> inputs;
    while (++at < count && std::string(arguments[at]) != "--") inputs.push_back(read_input(arguments[at]));
    run(session, inputs, "output" + std::to_string(number));
  }
  std::printf("%s %ld\n", OrtGetApiBase()->GetVersionString(), private_bytes() - before);
}
