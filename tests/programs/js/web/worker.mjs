// A worker that answers with a tensor of the archive whose URL it is sent.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";

onmessage = async ({ data: url }) => {
  const record = await open(url, { verify: "full" });
  const { data } = await record.tensor("encoder.w");
  postMessage({ path: record.path, data });
};
