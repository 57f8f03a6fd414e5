// ONNX Runtime from Java over a model and its archive: Session [-- NAME:TYPE:DIMS:FILE...]...
//
// Does what tests/programs/cpp/session.cpp does; the lines of zcrecord/onnx/README.md make `session` in the place that is marked.

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.stream.Stream;

class Session {
  static final Map<String, OnnxJavaType> TYPES =
      Map.of("float", OnnxJavaType.FLOAT, "int64", OnnxJavaType.INT64, "bool", OnnxJavaType.BOOL);

  static OnnxTensor readInput(OrtEnvironment environment, String[] parts) throws IOException, OrtException {
    byte[] bytes = Files.readAllBytes(Path.of(parts[3]));
    ByteBuffer data = ByteBuffer.allocateDirect(bytes.length).order(ByteOrder.nativeOrder()).put(bytes).rewind();
    long[] dims = Stream.of(parts[2].split("x")).filter(dim -> !dim.isEmpty()).mapToLong(Long::parseLong).toArray();
    return OnnxTensor.createTensor(environment, data, dims, TYPES.get(parts[1]));
  }

  static long privateBytes() throws IOException {
    for (String line : Files.readAllLines(Path.of("/proc/self/smaps_rollup")))
      if (line.startsWith("Anonymous:")) return Long.parseLong(line.replaceAll("\\D", "")) * 1024;
    return 0;
  }

  static void run(OrtSession session, Map<String, OnnxTensor> inputs, Path out) throws IOException, OrtException {
    try (OrtSession.Result results = session.run(inputs)) {
      ByteBuffer data = ((OnnxTensor) results.get(0)).getByteBuffer();
      byte[] bytes = new byte[data.remaining()];
      data.get(bytes);
      Files.write(out, bytes);
    }
  }

  public static void main(String[] arguments) throws IOException, OrtException {
    long before = privateBytes();
    // the guide's lines
    for (int at = 0, number = 0; at < arguments.length; number++) {
      Map<String, OnnxTensor> inputs = new HashMap<>();
      while (++at < arguments.length && !arguments[at].equals("--")) {
        String[] parts = arguments[at].split(":");
        inputs.put(parts[0], readInput(environment, parts));
      }
      run(session, inputs, Path.of("output" + number));
    }
    System.out.println(environment.getVersion() + " " + (privateBytes() - before));
  }
}
