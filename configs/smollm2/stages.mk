# Fine-tune SmolLM2 on its own answers and evaluate it: `make smollm2`, or any stage by its file. An interrupted stage
# resumes. BENCHMARKS is the folder of FastChat's question and reference files (configs/smollm2/eval.yaml).
SMOLLM2 := runs/smollm2
BENCHMARKS ?= benchmarks
STAGE := configs/smollm2
ADAPTER := adapter/adapter_model.safetensors
GENERATE := $(BIN)/aspd generate --model smollm2 --mode serial --batch 32 --max-new-tokens 448 --max-length 768 \
	--temperature 0.6 --top-p 0.9 --repetition-penalty 1.1
EVALUATE = $(BIN)/aspd eval run --output $(@D) $(STAGE)/eval.yaml $(foreach name,vicuna mt,\
	benchmarks.$(name).file=$(BENCHMARKS)/$(name)_bench/question.jsonl \
	benchmarks.$(name).references=$(BENCHMARKS)/$(name)_bench/reference_gpt-4.jsonl) \
	benchmarks.vicuna.suitable=$(wildcard $(BENCHMARKS)/vicuna_bench/suitable_for_parallel.csv)

.PHONY: smollm2
smollm2: $(SMOLLM2)/greedy/report.md $(SMOLLM2)/sampled/report.md

$(SMOLLM2)/questions.jsonl: $(STAGE)/questions.yaml | $(VENV)/.installed
	mkdir -p $(@D)
	$(BIN)/aspd data questions $< --count 3600 --output $@

# Existing answers are used unchanged; own_answers.jsonl.gz and own_lists.jsonl.gz in results/smollm2 are those of this
# project.
$(SMOLLM2)/answers.jsonl: | $(SMOLLM2)/questions.jsonl
	$(GENERATE) --input $(SMOLLM2)/questions.jsonl --output $@

# SmolLM2 answers most questions in prose; those that suit a list are asked again for one (docs/data.md).
$(SMOLLM2)/lists.jsonl: | $(SMOLLM2)/questions.jsonl
	grep -E '"kind": "(open lists|questions of judgement)"' $(SMOLLM2)/questions.jsonl > $(SMOLLM2)/suited.jsonl
	$(GENERATE) --input $(SMOLLM2)/suited.jsonl --output $@ --instruction "Give a short introduction, then a numbered \
	list of the most important points, each with a bold title and two or three sentences of explanation."

$(SMOLLM2)/data/structured.jsonl: $(SMOLLM2)/answers.jsonl $(SMOLLM2)/lists.jsonl $(STAGE)/data.yaml
	cat $(SMOLLM2)/answers.jsonl $(SMOLLM2)/lists.jsonl > $(SMOLLM2)/all.jsonl
	$(BIN)/aspd data build $(SMOLLM2)/all.jsonl --config $(STAGE)/data.yaml --output $(@D)

$(SMOLLM2)/%/$(ADAPTER): $(STAGE)/%.yaml $(SMOLLM2)/data/structured.jsonl
	$(BIN)/aspd train $< --output $(SMOLLM2)/$*

# Train draft heads on the merged adapter, because they are specific to the weights.
$(SMOLLM2)/merged/config.json: $(SMOLLM2)/aspd/$(ADAPTER)
	rm -rf $(@D)
	$(BIN)/aspd export $(SMOLLM2)/aspd --output $(@D)

$(SMOLLM2)/draft/draft_heads.safetensors: $(STAGE)/draft.yaml $(SMOLLM2)/merged/config.json
	$(BIN)/aspd train $< model.checkpoint=$(SMOLLM2)/merged --output $(@D)

# Masks and positions on the same records; every eighth one is held out.
.PHONY: smollm2-ablation
smollm2-ablation: $(STAGE)/ablation.yaml $(SMOLLM2)/data/structured.jsonl
	mkdir -p $(SMOLLM2)/ablation
	grep '"parallel"' $(SMOLLM2)/data/structured.jsonl | awk 'NR % 8' > $(SMOLLM2)/ablation/train.jsonl
	grep '"parallel"' $(SMOLLM2)/data/structured.jsonl | awk 'NR % 8 == 0' > $(SMOLLM2)/ablation/held_out.jsonl
	for siblings in invisible shared; do for positions in sequential max predict; do \
	  $(BIN)/aspd train $< model.siblings=$$siblings model.positions=$$positions \
	    --output $(SMOLLM2)/ablation/$$siblings-$$positions || exit 1; \
	done; done
	tail -n 1 $(SMOLLM2)/ablation/*/metrics.jsonl

$(SMOLLM2)/greedy/report.md: $(STAGE)/eval.yaml $(SMOLLM2)/aspd/$(ADAPTER) $(SMOLLM2)/seq/$(ADAPTER)
	$(EVALUATE)

$(SMOLLM2)/sampled/report.md: $(STAGE)/eval.yaml $(SMOLLM2)/aspd/$(ADAPTER) $(SMOLLM2)/seq/$(ADAPTER)
	$(EVALUATE) decoding.temperature=0.7 decoding.top_p=0.8
