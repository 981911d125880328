// llama.cpp through node-llama-cpp, one JSON line in, one out. Loaded by decode.py with --llama.
import {createInterface} from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";
import {readFileSync} from "node:fs";
import {join} from "node:path";

const [folder, modelPath, threads] = process.argv.slice(2);
const found = createRequire(join(folder, "package.json")).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(found).href);
const llama = await getLlama({gpu: false, build: "never", progressLogs: false, logLevel: "error", maxThreads: +threads});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 2048, threads: +threads, batchSize: 512});
const sequence = context.getSequence();

async function answer({prompt, max_tokens}) {
    await sequence.clearHistory();
    const start = performance.now(), ids = [];
    let first = 0;
    for await (const id of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        first ||= performance.now() - start;
        if (model.isEogToken(id)) break;
        ids.push(id);
        if (ids.length >= max_tokens) break;
    }
    return {token_ids: ids, seconds: (performance.now() - start) / 1e3, first_s: first / 1e3, num_forwards: ids.length};
}

async function rows({count, cached, repeats}) {
    let least = Infinity;
    for (let i = 0; i < repeats; i++) {
        await sequence.clearHistory();
        await sequence.evaluateWithoutGeneratingNewTokens(Array(cached).fill(300));
        const start = performance.now();
        await sequence.evaluateWithoutGeneratingNewTokens(Array(count).fill(301));
        least = Math.min(least, performance.now() - start);
    }
    return {milliseconds: least};
}

function close() {
    const line = readFileSync("/proc/self/status", "utf8").split("\n").find((text) => text.startsWith("VmHWM"));
    return {peak_memory_bytes: parseInt(line.split(/\s+/)[1]) * 1024};
}

const about = {ready: `node-llama-cpp, ${llama.systemInfo.trim()}`};
console.log(JSON.stringify(about));
for await (const line of createInterface({input: process.stdin})) {
    const ask = JSON.parse(line);
    const reply = ask.do === "answer" ? await answer(ask) : ask.do === "rows" ? await rows(ask) : close();
    console.log(JSON.stringify(reply));
    if (ask.do === "close") process.exit(0);
}
