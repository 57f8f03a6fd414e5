// Visits pages in Firefox: standard input has { packages, firefox, visits }, each visit a URL and the text of an async
// function to run there. Prints the results, with all that the pages complain of.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { packages, firefox, visits } = JSON.parse(readFileSync(0, "utf8"));
const { default: puppeteer } = await import(pathToFileURL(createRequire(`${packages}/`).resolve("puppeteer-core")));
const browser = await puppeteer.launch({ browser: "firefox", executablePath: firefox, headless: true });
try {
  const out = [];
  for (const [url, script] of visits) {
    const page = await browser.newPage();
    page.setDefaultTimeout(60_000);
    const complaints = [];
    page.on("console", (message) => {
      if (["error", "warn"].includes(message.type())) complaints.push(`${message.type()}: ${message.text()}`);
    });
    page.on("pageerror", (error) => complaints.push(`uncaught: ${error.message}`));
    await page.goto(url);
    const result = await page.evaluate(`(${script})()`);
    out.push({ result, complaints });
    await page.close();
  }
  process.stdout.write(JSON.stringify(out));
} finally {
  await browser.close();
}
