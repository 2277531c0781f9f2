// Validate KEDA's objects, a JSON array on standard input, and print a line for each that is wrong.
import * as keda from "@kubernetes-models/keda/keda.sh/v1alpha1";
import { text } from "node:stream/consumers";

for (const object of JSON.parse(await text(process.stdin))) {
  const Model = keda[object.kind];
  try {
    if (Model === undefined) throw new Error(`KEDA has no ${object.kind}`);
    new Model(object).validate();
  } catch (error) {
    console.log(`${object.kind} ${object.metadata?.name}: ${error.message}`);
  }
}
