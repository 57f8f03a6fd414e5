// Runs the suite in Node: `node run.mjs BASE FOLDER`, where archives are served and where they lie. One JSON line of
// { name, error } for each test.

import "./reading.mjs";
import "./serving.mjs";
import "./uploading.mjs";
import "./hollowing.mjs";
import "./onnx.mjs";
import "./webnn.mjs";
import "./files.mjs";
import { run } from "./harness.mjs";

const [base, folder] = process.argv.slice(2);
for (const result of await run({ base, folder })) process.stdout.write(`${JSON.stringify(result)}\n`);
