# Fine-tune a model on its own answers and evaluate it: `make smollm2`, `make qwen05`, or any stage by its file. An
# interrupted stage resumes. configs/MODEL holds the configurations of a model, runs/MODEL its files. BENCHMARKS is the
# folder of FastChat's question files (configs/smollm2/eval.yaml).
MODELS := smollm2 qwen05
BENCHMARKS ?= benchmarks
ADAPTER := adapter/adapter_model.safetensors
SAMPLING_smollm2 := --model smollm2 --max-new-tokens 448 --temperature 0.6 --top-p 0.9
SAMPLING_qwen05 := --model checkpoints/qwen2.5-coder-0.5b-instruct.gguf --max-new-tokens 512 --temperature 0.7 \
	--top-p 0.8 --top-k 20
GENERATE = $(BIN)/aspd generate $(SAMPLING_$*) --mode serial --batch 32 --max-length 768 --repetition-penalty 1.1
QUESTIONS_smollm2 := 3600
QUESTIONS_qwen05 := 1922
VICUNA = benchmarks.vicuna.file=$(BENCHMARKS)/vicuna_bench/question.jsonl \
	benchmarks.vicuna.suitable=$(wildcard $(BENCHMARKS)/vicuna_bench/suitable_for_parallel.csv)
EVALUATE = $(BIN)/aspd eval run --output $(@D) configs/$*/eval.yaml $(VICUNA) \
	benchmarks.mt.file=$(BENCHMARKS)/mt_bench/question.jsonl

# Checked first, because hours of sampling and training come before the evaluations.
.PHONY: benchmarks-exist
benchmarks-exist:
	@test -f $(BENCHMARKS)/vicuna_bench/question.jsonl || { \
	  echo "BENCHMARKS: expected a folder with FastChat's vicuna_bench/question.jsonl, got $(BENCHMARKS)"; exit 1; }

.PHONY: $(MODELS)
$(MODELS): %: benchmarks-exist runs/%/greedy/report.md runs/%/sampled/report.md

runs/%/questions.jsonl: configs/questions.jsonl | $(VENV)/.installed
	mkdir -p $(@D)
	head -n $(QUESTIONS_$*) $< > $@

# Existing answers are used unchanged; own_answers.jsonl.gz and own_lists.jsonl.gz in results/MODEL are those of this
# project.
runs/%/answers.jsonl: | runs/%/questions.jsonl
	$(GENERATE) --input runs/$*/questions.jsonl --output $@

# SmolLM2 answers most questions in prose; those that suit a list are asked again for one (docs/data.md).
runs/%/lists.jsonl: | runs/%/questions.jsonl
	grep -E '"kind": "(open lists|questions of judgement)"' runs/$*/questions.jsonl > $(@D)/suited.jsonl
	$(GENERATE) --input $(@D)/suited.jsonl --output $@ --instruction "Give a short introduction, then a numbered \
	list of the most important points, each with a bold title and two or three sentences of explanation."

runs/smollm2/all.jsonl: runs/smollm2/lists.jsonl
runs/%/all.jsonl: runs/%/answers.jsonl
	cat $^ > $@

runs/%/data/structured.jsonl: runs/%/all.jsonl configs/%/data.yaml
	$(BIN)/aspd data build $< --config configs/$*/data.yaml --output $(@D)

runs/%/aspd/$(ADAPTER): configs/%/aspd.yaml runs/%/data/structured.jsonl
	$(BIN)/aspd train $< --output runs/$*/aspd

runs/%/seq/$(ADAPTER): configs/%/seq.yaml runs/%/data/structured.jsonl
	$(BIN)/aspd train $< --output runs/$*/seq

runs/%/greedy/report.md: configs/%/eval.yaml runs/%/aspd/$(ADAPTER) runs/%/seq/$(ADAPTER)
	$(EVALUATE)

runs/%/sampled/report.md: configs/%/eval.yaml runs/%/aspd/$(ADAPTER) runs/%/seq/$(ADAPTER)
	$(EVALUATE) decoding.temperature=0.7 decoding.top_p=0.8

# Train draft heads on the merged adapter, because they are specific to the weights.
runs/%/merged/config.json: runs/%/aspd/$(ADAPTER)
	rm -rf $(@D)
	$(BIN)/aspd export runs/$*/aspd --output $(@D)

runs/%/draft/draft_heads.safetensors: configs/%/draft.yaml runs/%/merged/config.json
	$(BIN)/aspd train $< model.checkpoint=runs/$*/merged --output $(@D)

# Masks and positions on the same records; every eighth one is held out.
.PHONY: smollm2-ablation
smollm2-ablation: configs/smollm2/ablation.yaml runs/smollm2/data/structured.jsonl
	mkdir -p runs/smollm2/ablation
	grep '"parallel"' runs/smollm2/data/structured.jsonl | awk 'NR % 8' > runs/smollm2/ablation/train.jsonl
	grep '"parallel"' runs/smollm2/data/structured.jsonl | awk 'NR % 8 == 0' > runs/smollm2/ablation/held_out.jsonl
	$(BIN)/aspd ablate $< --output runs/smollm2/ablation

# Files of a run are kept, although they are only steps towards its report.
.SECONDARY:
