// Print what AsyncAPI's parser finds in a document, as JSON: [{severity, code, path, message}].
import { Parser, fromFile } from "@asyncapi/parser";

const { document, diagnostics } = await fromFile(new Parser(), process.argv[2]).parse();
const found = diagnostics.map(({ severity, code, path, message }) => ({
  severity,
  code,
  path: path.join("/"),
  message,
}));
const operations = document ? document.operations().all().map((each) => each.id()) : [];
console.log(JSON.stringify({ diagnostics: found, operations }));
