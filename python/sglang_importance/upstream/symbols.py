"""What we call, override or hook of sglang, with the parameters that we count on.

Names that a method of ours overrides matter as much as those that we call: upstream would call ours with its
new arguments.
"""

from __future__ import annotations

_SRT = "sglang.srt"
_CACHE = f"{_SRT}.mem_cache"
_TREE_CORE = f"{_CACHE}.unified_cache.unified_tree_core.UnifiedTreeCore"
_FULL = f"{_CACHE}.unified_cache.components.FullComponent"
_MAMBA = f"{_CACHE}.unified_cache.components.MambaComponent"
_RADIX_CACHE = f"{_CACHE}.unified_radix_cache.UnifiedRadixCache"
_BUFFER = f"{_CACHE}.buffer_mode"
_CONTROLLER = f"{_CACHE}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_STREAMER = f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_UPDATER = f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TRITON = f"{_SRT}.layers.attention.triton_backend.TritonAttnBackend"
_FLASHINFER = f"{_SRT}.layers.attention.flashinfer_backend.FlashInferAttnBackend"
_TORCH_NATIVE = f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend"

# Parameter names in order, as in a signature; several where releases differ, and ``differences`` or the
# override takes each; None where only the existence counts.
SYMBOLS: dict[str, str | tuple[str, ...] | None] = {
    # the launch
    f"{_SRT}.environ.envs.SGLANG_RUST_SERVER": None,
    f"{_SRT}.plugins.hook_registry.HookRegistry.register": "target, hook, hook_type, *, source",
    f"{_SRT}.plugins.hook_registry.HookRegistry.apply_hooks": "",
    f"{_SRT}.plugins.hook_registry.HookRegistry._hooks": None,
    f"{_SRT}.plugins.hook_registry.HookRegistry._patched": None,
    f"{_SRT}.plugins.hook_registry.HookType": None,
    f"{_SRT}.plugins.load_plugins": "",
    f"{_SRT}.server_args.prepare_server_args": "argv",
    f"{_SRT}.server_args.ServerArgs.add_cli_args": "parser",
    f"{_SRT}.server_args.ServerArgs.from_cli_args": "args",
    f"{_SRT}.server_args.ServerArgs.resolve_once": "self",
    f"{_SRT}.server_args.ServerArgs.launch_command": None,
    f"{_SRT}.arg_groups.mamba_hook.validate_mamba_no_buffer": "view, model_arch",
    f"{_SRT}.arg_groups.overrides.resolving_view": "server_args",
    f"{_SRT}.entrypoints.engine.Engine._launch_subprocesses": (
        "server_args, init_tokenizer_manager_func, run_scheduler_process_func, "
        "run_detokenizer_process_func, port_args, placement_group"
    ),
    f"{_SRT}.utils.common.kill_process_tree": "parent_pid, include_parent, skip_pid, wait_timeout",
    f"{_SRT}.managers.scheduler.Scheduler.__init__": "self, server_args, port_args",
    f"{_SRT}.managers.scheduler.Scheduler.get_init_info": "self",
    f"{_SRT}.managers.schedule_batch.Req.output_ids_through_stop": None,
    f"{_SRT}.managers.scheduler.Scheduler.process_batch_result": "self, batch, result",
    f"{_SRT}.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens": "self, chunk_limit",
    f"{_SRT}.mem_cache.prefill_budget.PrefillBudget.remaining_current": None,
    f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.create_prefill_budget": (
        "self, tree_cache, *, num_mixed_decode_tokens"
    ),
    f"{_SRT}.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.create_prefill_budget": (
        "self, tree_cache, *, num_mixed_decode_tokens"
    ),
    f"{_SRT}.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.full_available_size": "self",
    f"{_SRT}.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.swa_available_size": "self",
    f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory": (
        "self, input_tokens, max_new_tokens, *, token_capacity, sliding_window_size, chunk_size"
    ),
    f"{_SRT}.managers.schedule_policy.AddReqResult": None,
    f"{_SRT}.managers.schedule_policy.PrefillAdder._select_prefill_admission": (
        "self, req, *, total_tokens, host_hit_length, swa_host_hit_length, truncation_align_size, "
        "has_chunked_req"
    ),
    f"{_SRT}.managers.schedule_policy.PrefillAdder.preempt_to_schedule": "self, req",
    f"{_SRT}.managers.scheduler.Scheduler.get_new_batch_prefill": "self, running_batch",
    f"{_SRT}.managers.scheduler.Scheduler._add_request_to_queue": "self, req, is_retracted",
    # why a prompt was not found
    f"{_SRT}.managers.schedule_batch.ScheduleBatch.prepare_for_extend": "self",
    f"{_SRT}.managers.schedule_batch.ScheduleBatch.prepare_for_decode": "self",
    f"{_SRT}.managers.schedule_batch.ScheduleBatch.check_decode_mem": "self, selected_indices",
    f"{_SRT}.managers.schedule_batch.Req.owned_kv_len": "self",
    f"{_UPDATER}.flush_cache_after_weight_update": None,
    f"{_RADIX_CACHE}.init_load_back": "self, params",
    f"{_RADIX_CACHE}.prefetch_from_storage": None,
    # the control plane
    f"{_SRT}.managers.scheduler.Scheduler.init_request_dispatcher": "self",
    f"{_SRT}.managers.io_struct.BaseReq": None,
    f"{_SRT}.managers.io_struct.hook_custom_types": "*new_types",
    f"{_SRT}.managers.tokenizer_control_mixin._COMMUNICATOR_SPECS": None,
    # pre-warming
    f"{_SRT}.managers.io_struct.GenerateReqInput.cache_salt": None,
    f"{_SRT}.managers.io_struct.GenerateReqInput.extra_key": None,
    f"{_SRT}.managers.io_struct.GenerateReqInput.rid": None,
    f"{_SRT}.managers.tokenizer_manager.ReqState.dispatched": None,
    f"{_SRT}.managers.tokenizer_manager.ReqState.finished": None,
    f"{_SRT}.managers.tokenizer_manager.ReqState.time_stats": None,
    f"{_SRT}.managers.tokenizer_manager.ServerStatus.Starting": None,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager._release_req_states_on_failure": (
        "self, rids",
        "self, request_states",
    ),
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.abort_request": "self, rid, abort_all",
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.generate_request": "self, obj, request",
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.gracefully_exit": None,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager.server_status": None,
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager": None,
    f"{_SRT}.managers.multi_tokenizer_mixin.MultiTokenizerRouter": None,
    f"{_SRT}.managers.multi_tokenizer_mixin.TokenizerWorker": None,
    f"{_SRT}.managers.multi_tokenizer_mixin.get_tokenizer_worker_class": "server_args",
    f"{_SRT}.server_args.ServerArgs.get_tokenizer_worker_class": "self",
    f"{_SRT}.observability.req_time_stats.APIServerReqTimeStats.first_token_time": None,
    f"{_SRT}.entrypoints.http_server.app": None,
    f"{_SRT}.entrypoints.http_server.get_global_state": "",
    "sglang.utils.TypeBasedDispatcher": None,
    f"{_SRT}.utils.auth.AuthLevel.ADMIN_OPTIONAL": None,
    f"{_SRT}.utils.auth.auth_level": "level",
    # the tokens of a prompt that a caller names
    f"{_SRT}.entrypoints.openai.protocol.ChatCompletionRequest": None,
    f"{_SRT}.entrypoints.openai.protocol.ChatCompletionResponse": None,
    f"{_SRT}.entrypoints.openai.serving_chat.OpenAIServingChat._validate_request": "self, request",
    f"{_SRT}.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request": (
        "self, request, raw_request"
    ),
    f"{_SRT}.managers.io_struct.GenerateReqInput.contains_mm_input": "self",
    f"{_SRT}.managers.tokenizer_manager.TokenizerManager._tokenize_texts": "self, texts, is_cross_encoder",
    # the fields of requests, and messages that a scheduler cannot take in
    f"{_SRT}.configs.load_config.LoadFormat": None,
    f"{_SRT}.entrypoints.anthropic.serving.AnthropicServing._error_response": (
        "self, status_code, error_type, message, exception_name"
    ),
    f"{_SRT}.entrypoints.openai.serving_tokenize.OpenAIServingTokenize": None,
    f"{_SRT}.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize": None,
    f"{_SRT}.managers.io_struct.AbortReq": None,
    f"{_SRT}.managers.io_struct.BatchTokenizedGenerateReqInput": None,
    f"{_SRT}.managers.io_struct.BatchTokenizedEmbeddingReqInput": None,
    f"{_SRT}.managers.io_struct.TokenizedEmbeddingReqInput": None,
    f"{_SRT}.managers.scheduler.Scheduler.abort_request": "self, recv_req",
    f"{_SRT}.managers.scheduler.Scheduler.collect_inflight_reqs": "self",
    f"{_SRT}.managers.io_struct.EmbeddingReqInput": None,
    f"{_SRT}.sampling.custom_logit_processor.CustomLogitProcessor": None,
    f"{_SRT}.sampling.sampling_params.SamplingParams": None,
    f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo": None,
    f"{_SRT}.constrained.base_grammar_backend.BaseGrammarBackend.set_cache": "self, key, value",
    f"{_SRT}.constrained.base_grammar_backend.BaseGrammarBackend.reset": "self",
    f"{_SRT}.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask": "self, vocab_mask, idx",
    f"{_SRT}.constrained.xgrammar_backend.XGrammarGrammar.accept_token": "self, token",
    f"{_SRT}.speculative.spec_utils.traverse_tree": None,
    f"{_SRT}.model_executor.model_runner.ModelRunner._preprocess_logits": (
        "self, logits_output, sampling_info, observer"
    ),
    # hints and reports
    f"{_SRT}.managers.io_struct.GenerateReqInput.kv_hints": None,
    f"{_SRT}.managers.io_struct.TokenizedGenerateReqInput.kv_hints": None,
    f"{_SRT}.managers.kv_hints.KvHintsEnvelope.actions": None,
    # sessions
    f"{_SRT}.managers.io_struct.GenerateReqInput.session_id": None,
    f"{_SRT}.managers.io_struct.TokenizedGenerateReqInput.session_id": None,
    f"{_SRT}.session.session_controller.SessionController.__contains__": "self, session_id",
    f"{_SRT}.session.session_controller.Session.create_req": (
        "self, req, tokenizer, vocab_size, eos_token_ids, disagg_mode",
        "self, req, tokenizer, vocab_size, eos_token_ids, disagg_mode, req_factory",
    ),
    f"{_SRT}.managers.kv_hints.KvHintAction.payload": None,
    f"{_STREAMER}.get_cached_tokens_details": "self, req",
    f"{_SRT}.entrypoints.anthropic.protocol.AnthropicMessage": None,
    f"{_SRT}.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request": (
        "self, anthropic_request"
    ),
    f"{_SRT}.entrypoints.openai.protocol.ErrorResponse": None,
    f"{_SRT}.managers.io_struct.GenerateReqInput.lora_id": None,
    f"{_SRT}.managers.io_struct.GenerateReqInput.lora_path": None,
    f"{_SRT}.entrypoints.openai.protocol.CompletionRequest": None,
    f"{_SRT}.entrypoints.openai.serving_base.OpenAIServingBase.handle_request": "self, request, raw_request",
    f"{_SRT}.entrypoints.openai.serving_base.OpenAIServingBase.create_error_response": (
        "self, message, err_type, status_code, param"
    ),
    # how an answer ended
    f"{_SRT}.entrypoints.openai.serving_chat.OpenAIServingChat._build_chat_response": (
        "self, request, ret, created"
    ),
    f"{_SRT}.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream": (
        "self, adapted_request, request, raw_request"
    ),
    f"{_SRT}.function_call.function_call_parser.FunctionCallParser": None,
    f"{_SRT}.function_call.base_format_detector.BaseFormatDetector.has_tool_call": "self, text",
    # the radix cache
    f"{_CACHE}.cache_init_params.CacheInitParams.component_registry_override": None,
    f"{_CACHE}.cache_init_params.CacheInitParams.tp_cache_group": None,
    f"{_CACHE}.registry.TreeCacheBuildContext": None,
    f"{_CACHE}.registry.get_radix_cache_factory": "name",
    f"{_CACHE}.registry.register_radix_cache_backend": "name, factory",
    f"{_CACHE}.registry.create_unified_radix_cache": "ctx, *, cache_class",
    f"{_RADIX_CACHE}.__init__": "self, params",
    f"{_RADIX_CACHE}.reset": "self",
    f"{_RADIX_CACHE}.sanity_check": "self",
    f"{_RADIX_CACHE}.match_prefix": "self, params",
    f"{_RADIX_CACHE}._evict": (
        "self, params, available_size_targets",
        "self, params, available_size_targets, *, allocation_reclaim_satisfied",
    ),
    f"{_RADIX_CACHE}.release_aborted_request": "self, request",
    f"{_RADIX_CACHE}.backup_node_for_write_back": "self, node_id",
    f"{_RADIX_CACHE}.write_backup_storage": "self, node_id",
    f"{_RADIX_CACHE}._finish_write_through_ack": "self, ack_id",
    f"{_CACHE}.hicache_storage.PoolName.KV": None,
    f"{_BUFFER}.pipeline._UnifiedBufferBackupEntry.host_indices": None,
    f"{_BUFFER}.pipeline._UnifiedBufferBackupEntry.intent": None,
    f"{_BUFFER}.pipeline._UnifiedBackupIntent.snapshot": None,
    f"{_CACHE}.unified_cache.unified_tree_core_interface.BufferBackupSnapshot.node_id": None,
    f"{_RADIX_CACHE}.clear_storage_backend": "self",
    f"{_RADIX_CACHE}.detach_storage_backend": "self",
    f"{_RADIX_CACHE}._drain_storage_control_queues_impl": (
        "self, n_storage_hit, n_ack_prefetch, n_backup, n_release, extra_release_counts, log_metrics"
    ),
    # the tree component
    f"{_CACHE}.unified_cache.components.CacheTransferPhase.BACKUP_HOST": None,
    f"{_CACHE}.unified_cache.components.CacheTransferPhase.LOAD_BACK": None,
    f"{_CACHE}.unified_cache.components.ComponentType.FULL": None,
    f"{_CACHE}.base_prefix_cache.MatchPrefixParams.key": None,
    f"{_CACHE}.base_prefix_cache.EvictParams.num_tokens": None,
    f"{_CACHE}.radix_cache.RadixKey.__init__": ("self, token_ids, extra_key, is_bigram, limit, cache_salt"),
    f"{_CACHE}.base_prefix_cache.InsertParams.prev_prefix_len": None,
    f"{_CACHE}.base_prefix_cache.InsertResult.last_device_node": None,
    f"{_CACHE}.radix_cache.RadixKey.child_key": "self, page_size",
    f"{_CACHE}.radix_cache.RadixKey.match": "self, other, page_size",
    f"{_CACHE}.radix_cache.RadixKey.maybe_to_bigram_view": "self, is_eagle, value",
    f"{_CACHE}.radix_cache.RadixKey.raw_token_ids": "self",
    f"{_FULL}.__init__": "self, cache, params",
    f"{_FULL}._ensure_eviction_strategy": "self",
    f"{_FULL}._evict_device_start": "self, request_cnt",
    f"{_FULL}._evict_device_next_node": (
        "self, tracker, device_frees, host_frees",
        "self, tracker, device_frees, host_frees, cache_actions",
    ),
    f"{_FULL}._evict_device_end": "self",
    f"{_FULL}.drive_host_eviction": (
        "self, num_tokens, tracker, device_frees, host_frees",
        "self, num_tokens, tracker, device_frees, host_frees, cache_actions",
    ),
    f"{_FULL}.evict_component": (
        "self, node, device_frees, host_frees, target",
        "self, node, device_frees, host_frees, cache_actions, target",
    ),
    f"{_FULL}.redistribute_on_node_split": "self, new_parent, child",
    f"{_FULL}.discard_deleted_session_leaf": "self, node",
    f"{_FULL}.commit_insert_component_data": "self, node, is_new_leaf, params, result, cache_actions",
    f"{_FULL}.commit_hicache_transfer": (
        "self, node, phase, transfers, *, cache_actions, insert_result, pool_storage_result"
    ),
    f"{_FULL}.prepare_for_caching_req": "self, req, insert_params, token_ids_len, is_finished",
    f"{_FULL}.cleanup_after_caching_req": "self, req, is_finished, insert_result, insert_params",
    f"{_MAMBA}.__init__": "self, cache, params",
    f"{_MAMBA}._evict_device_start": "self, request_cnt",
    f"{_MAMBA}._evict_device_next_node": (
        "self, tracker, device_frees, host_frees",
        "self, tracker, device_frees, host_frees, cache_actions",
    ),
    f"{_MAMBA}._evict_device_end": "self",
    f"{_MAMBA}.commit_insert_component_data": "self, node, is_new_leaf, params, result, cache_actions",
    f"{_MAMBA}.commit_hicache_transfer": (
        "self, node, phase, transfers, *, cache_actions, insert_result, pool_storage_result"
    ),
    f"{_MAMBA}.evict_component": (
        "self, node, device_frees, host_frees, target",
        "self, node, device_frees, host_frees, cache_actions, target",
    ),
    # the tree core
    f"{_CACHE}.unified_cache.unified_tree_core.UnifiedTreeNode.backuped": None,
    f"{_TREE_CORE}.reset": "self",
    f"{_TREE_CORE}.node_by_id": "self, node_id",
    f"{_TREE_CORE}.match_full_device_prefix": "self, key",
    f"{_TREE_CORE}._add_new_node": "self, parent, key, value, priority, session_id, rotation_base",
    f"{_TREE_CORE}._split_node": "self, key, child, split_len",
    f"{_TREE_CORE}._remove_leaf_from_parent": "self, node",
    f"{_TREE_CORE}._update_evictable_leaf_sets": "self, node",
    f"{_TREE_CORE}._evict_host_leaf": (
        "self, node, tracker, device_frees, host_frees",
        "self, node, tracker, device_frees, host_frees, cache_actions",
    ),
    # wrapped by the filter of backups
    f"{_TREE_CORE}._inc_hit_count_and_check": ("self, node, chunked", "self, node"),
    f"{_TREE_CORE}.evict_device_leaf": "self, node_id, is_write_back",
    # the store
    f"{_CACHE}.hicache_storage.HiCacheStorage.register_mem_pool_host": "self, mem_pool_host",
    f"{_CACHE}.hicache_storage.HiCacheStorage.register_mem_host_pool_v2": "self, host_pool, host_pool_name",
    f"{_CACHE}.hicache_storage.HiCacheStorage.batch_exists": "self, keys, extra_info",
    f"{_CACHE}.hicache_storage.HiCacheStorage.batch_get_v1": "self, keys, host_indices, extra_info",
    f"{_CACHE}.hicache_storage.HiCacheStorage.batch_set_v1": "self, keys, host_indices, extra_info",
    f"{_CACHE}.hicache_storage.HiCacheStorage.get": "self, key, target_location, target_sizes",
    f"{_CACHE}.hicache_storage.HiCacheStorage.set": "self, key, value, target_location, target_sizes",
    f"{_CACHE}.hicache_storage.HiCacheStorage.exists": "self, key",
    f"{_CACHE}.hicache_storage.HiCacheStorageConfig.extra_config": None,
    f"{_CACHE}.hicache_storage.HiCacheStorageConfig.is_mla_model": None,
    f"{_CACHE}.hicache_storage.HiCacheStorageConfig.is_page_first_layout": None,
    f"{_CACHE}.hicache_storage.HiCacheStorageConfig.should_split_heads": None,
    f"{_CACHE}.hicache_storage.HiCacheStorageConfig.tp_lcm_size": None,
    f"{_CACHE}.memory_pool.MHATokenToKVPool": None,
    f"{_CACHE}.pool_host.mha.MHATokenToKVPoolHost.__init__": (
        "self, device_pool, host_to_device_ratio, host_size, page_size, layout, pin_memory, device, "
        "allocator_type, *, mtp_draft_device_pools, pool_label",
        "self, buffer_info, host_to_device_ratio, host_size, page_size, layout, pin_memory, device, "
        "allocator_type, *, device_capacity_tokens, start_layer, end_layer, draft_buffer_infos, "
        "write_back_staging, pool_label, head_group_num, host_token_capacity",
    ),
    f"{_CACHE}.pool_host.mha.can_use_hicache_jit_kernel": None,
    f"{_CACHE}.pool_host.mha.can_use_write_back_jit_kernel": None,
    f"{_CACHE}.hicache_storage.HiCacheStorageExtraInfo.prefix_keys": None,
    f"{_CACHE}.storage.StorageBackendFactory.create_backend": (
        "backend_name, storage_config, mem_pool_host, **kwargs"
    ),
    f"{_CONTROLLER}._page_transfer_kv_batch": (
        "self, operation, batch_hashes, batch_host_indices, extra_info, kv_derived_transfers"
    ),
    f"{_CONTROLLER}._reduce_prefetch_ack": "self, ack",
    "sglang.srt.managers.cache_controller.PrefetchAck.__init__": (
        "self, rid, operation, completed_tokens, pool_hits, completed_req"
    ),
    f"{_CONTROLLER}.prefetch_thread_func": "self",
    f"{_CONTROLLER}.prefetch_io_aux_func": "self",
    f"{_CONTROLLER}.prefetch_sync_thread_func": "self",
    f"{_CONTROLLER}._storage_hit_query": ("self, operation, pp_rank", "self, operation"),
    f"{_CONTROLLER}._page_transfer": "self, operation",
    f"{_CONTROLLER}._page_backup": "self, operation",
    f"{_CONTROLLER}.backup_thread_func": "self",
    f"{_RADIX_CACHE}._can_terminate_prefetch": "self, operation",
    f"{_RADIX_CACHE}._all_reduce": "self, data, tp_reduce_op",
    f"{_RADIX_CACHE}._handle_prefetch_result": "self, operation",
    f"{_RADIX_CACHE}.total_size": "self",
    f"{_SRT}.managers.scheduler.Scheduler.handle_update_weight_version": "self, recv_req",
    f"{_SRT}.managers.scheduler.Scheduler.is_fully_idle": "self, for_health_check, ignore_waiting",
    f"{_SRT}.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.check_pending": "self",
    f"{_UPDATER}.begin_weight_update": "self, recv_req",
    f"{_UPDATER}.end_weight_update": "self, recv_req",
    f"{_UPDATER}.update_weights_from_disk": "self, recv_req",
    f"{_UPDATER}.update_weights_from_distributed": "self, recv_req",
    f"{_UPDATER}.update_weights_from_tensor": "self, recv_req",
    f"{_UPDATER}.update_weights_from_ipc": "self, recv_req",
    f"{_SRT}.runtime_context.get_serving": "",
    # tiered pages
    f"{_SRT}.models.utils.enable_fused_set_kv_buffer": "forward_batch",
    f"{_SRT}.runtime_context.get_parallel": "",
    f"{_SRT}.runtime_context.get_schedule": "",
    f"{_CACHE}.memory_pool.KVWriteLoc": None,
    f"{_CACHE}.memory_pool.MHATokenToKVPool._store_kv_layer": "self, layer_idx, loc, cache_k, cache_v",
    f"{_CACHE}.allocator.paged.PagedTokenToKVPoolAllocator._release_page_ids": "self, *page_ids",
    f"{_CACHE}.allocator.paged.PagedTokenToKVPoolAllocator.clear": "self",
    f"{_CACHE}.allocator.paged.PagedTokenToKVPoolAllocator.create_prefill_budget": (
        "self, tree_cache, *, num_mixed_decode_tokens"
    ),
    f"{_CACHE}.prefill_budget.PrefillBudget.available_chunk_tokens": "self, chunk_limit",
    f"{_CACHE}.prefill_budget.PrefillBudget.ceil_paged_tokens": "self, tokens",
    f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs": "self, token_capacity",
    f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool": None,
    f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": None,
    f"{_CACHE}.memory_pool.MHATokenToKVPool._init_data_ptrs_and_strides": "self",
    f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool_allocator": None,
    # attention
    f"{_SRT}.layers.attention.attention_registry.ATTENTION_BACKENDS": None,
    f"{_SRT}.layers.attention.attention_registry.register_attention_backend": "name",
    f"{_SRT}.configs.hybrid_arch.hybrid_gdn_config": "model_config",
    f"{_SRT}.configs.hybrid_arch.mambaish_config": None,
    f"{_SRT}.configs.model_config.ModelConfig": None,
    f"{_SRT}.configs.model_config.is_deepseek_dsa": None,
    f"{_SRT}.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.__init__": (
        "self, full_attn_backend, linear_attn_backend, full_attn_layers"
    ),
    f"{_CACHE}.memory_pool.HybridLinearKVPool": None,
    f"{_SRT}.layers.radix_attention.AttentionType.DECODER": None,
    f"{_SRT}.layers.radix_attention.RadixAttention": None,
    f"{_SRT}.model_executor.cuda_graph_config.Backend.DISABLED": None,
    f"{_SRT}.model_executor.cuda_graph_config.check_cuda_graph_backend": "phase, backend",
    f"{_SRT}.model_executor.forward_batch_info.CaptureHiddenMode": None,
    f"{_SRT}.model_executor.forward_batch_info.ForwardBatch": None,
    f"{_SRT}.model_executor.forward_context.ForwardContext": None,
    f"{_SRT}.model_executor.forward_context.forward_context": None,
    f"{_SRT}.model_executor.forward_batch_info.ForwardMode.DECODE": None,
    f"{_SRT}.model_executor.forward_batch_info.ForwardMode.EXTEND": None,
    f"{_SRT}.model_executor.model_runner.ModelRunner.forward": (
        "self, forward_batch, skip_attn_backend_init, pp_proxy_tensors, reinit_attn_backend, "
        "split_forward_count"
    ),
    f"{_SRT}.model_executor.model_runner.ModelRunner.sample": "self, logits_output, forward_batch",
    f"{_SRT}.model_executor.model_runner.ModelRunnerOutput.can_run_graph": None,
    f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph": (
        "self, forward_batch"
    ),
    f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend.shared_read_ends": "self, fm",
    f"{_SRT}.layers.attention.base_attn_backend.SharedReadEnds.POST_REPLAY": None,
    f"{_SRT}.layers.attention.base_attn_backend.SharedReadEnds.max_of": "items",
    f"{_SRT}.layers.attention.flashinfer_backend.DecodeMetadata.decode_wrappers": None,
    f"{_FLASHINFER}.__init__": (
        "self, model_runner, skip_prefill, kv_indptr_buf, kv_last_page_len_buf, init_new_workspace"
    ),
    f"{_FLASHINFER}._check_kv_attention_access": "self, phase, access",
    f"{_FLASHINFER}._create_decode_wrappers": "self, bs, num_tokens",
    f"{_FLASHINFER}.forward_decode": "self, q, k, v, layer, forward_batch, save_kv_cache",
    f"{_TRITON}.__init__": (
        "self, model_runner, skip_prefill, kv_indptr_buf",
        "self, model_runner, skip_prefill, kv_indptr_buf, *, dllm_fa4",
    ),
    f"{_TRITON}.needs_cpu_seq_lens": None,
    f"{_TRITON}.forward_decode": (
        "self, q, k, v, layer, forward_batch, save_kv_cache, sinks, score_mod, aux_tensors"
    ),
    f"{_TORCH_NATIVE}.__init__": "self, model_runner",
    f"{_TORCH_NATIVE}.init_forward_metadata": "self, forward_batch",
    f"{_TORCH_NATIVE}.forward_extend": "self, q, k, v, layer, forward_batch, save_kv_cache",
    f"{_TORCH_NATIVE}.forward_decode": "self, q, k, v, layer, forward_batch, save_kv_cache",
}


# Of each, one: an insert says in either way whether it is a chunk of a prompt (``differences.is_chunk``), and
# either knows what storage has (``differences.is_believed_stored``).
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    (
        f"{_CACHE}.base_prefix_cache.InsertParams.chunked",
        f"{_CACHE}.base_prefix_cache.InsertParams.inserted_len",
    ),
    (
        f"{_BUFFER}.storage_existence_cache.StorageExistenceCache.covers_all",
        f"{_BUFFER}.storage_existence_cache.PoolExistenceBeliefs.covered",
    ),
)
