// llama.cpp through node-llama-cpp: one line {"prompts", "max_tokens"} in, one line of figures out. Started by peers.py.
import {createInterface} from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";
import {join, resolve} from "node:path";

const [folder, modelPath, threads, sequences, places] = process.argv.slice(2);
const found = createRequire(join(resolve(folder), "package.json")).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(found).href);
const llama = await getLlama({gpu: false, build: "never", progressLogs: false, logLevel: "error", maxThreads: +threads});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    sequences: +sequences, contextSize: +places, threads: +threads, batchSize: 512, ignoreMemorySafetyChecks: true
});
const all = Array.from({length: +sequences}, () => context.getSequence());

async function answer(sequence, prompt, maxTokens, start) {
    let first = 0, count = 0;
    for await (const id of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        first ||= performance.now() - start;
        if (model.isEogToken(id)) break;
        if (++count >= maxTokens) break;
    }
    return {count, first_s: first / 1e3};
}

console.log(JSON.stringify({ready: llama.systemInfo.trim()}));
for await (const line of createInterface({input: process.stdin})) {
    const {prompts, max_tokens} = JSON.parse(line);
    for (const sequence of all) await sequence.clearHistory();
    const start = performance.now();
    const done = await Promise.all(prompts.map((prompt, i) => answer(all[i], prompt, max_tokens, start)));
    const seconds = (performance.now() - start) / 1e3;
    console.log(JSON.stringify({seconds, counts: done.map((d) => d.count), first_s: done.map((d) => d.first_s)}));
}
