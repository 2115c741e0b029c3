"""Kernels by name, with the names that the profiler gives, and where a step's time goes."""

from __future__ import annotations

import pytest

from codetta.bench.profile import (
    ATTENTION,
    GAPS,
    LIBRARY_GEMM,
    OPTIMIZER,
    OTHER,
    OUR_GEMM,
    SHARES,
    Interval,
    is_no_kernel,
    kind_of,
    of_kernels,
)

NAMES = {
    OUR_GEMM: [
        "kernel_cutlass_kernel_quackepiloguefrontendGemmMod_epilogue_76bd096995af1b43__value_sm9_object_at__TiledMMA_"
        "ThrLayoutVMNK1281111000_PermutationMNK____MMAAtom_ThrID1281_ShapeMNK6412816_TVL_0",
        "kernel_cutlass_kernel_quackgemm_sm90GemmSm90_object_at__TiledMMA_ThrLayoutVMNK2561111000_0",
    ],
    LIBRARY_GEMM: [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
        "nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off_kernel"
        "__5x_cublas",
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel"
        "__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
        "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nt_align8",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_tn_align8>(cutlass_80_"
        "tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_tn_align8::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false, "
        "false>(cublasLt::cublasSplitKParams<float>, float const*)",
        "triton_tem_fused_mm_t_7",
        "aten::mm",
        "aten::addmm",
    ],
    ATTENTION: [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
        "cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, "
        "false, false, true, true, false, false>(pytorch_flash::Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64, "
        "128, 128, 8, 4, 4, 4, false, false, cutlass::bfloat16_t> >(pytorch_flash::Flash_bwd_params)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, pytorch_flash::Flash_bwd_kernel_traits<64, 128> >()",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_2_64x64x128_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, "
        "cutlass::arch::Sm80, true, 64, 128, 128, true, true>::Params)",
        "fmha_cutlassB_bf16_aligned_128x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<>::Params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
        "CollectiveMainloopFwdSm90<2> > > >(flash::FlashAttnFwdSm90::Params)",
        "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object_at__gemm_0",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_flash_attention_forward",
    ],
    OPTIMIZER: [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<c10::BFloat16, 4,"
        " (at::native::(anonymous namespace)::ADAM_MODE)1, false>, float const*, double>()",
        "aten::_fused_adamw_",
    ],
    OTHER: [
        "triton_poi_fused__unsafe_view_mul_silu_3",
        "triton_red_fused__log_softmax__to_copy_nll_loss_forward_5",
        "triton_per_fused_add_mm_mul_sum_9",  # named after the GEMM whose result it reads
        "rows_finalize_of_ssq_0",
        "rows_gate_up_leftover_1",
        "_rms_norm_forward_kernel",
        "_swiglu_backward_kernel",
        "liger_cross_entropy_kernel",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor> >()",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >()",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "aten::mul",
        "aten::transpose",
    ],
}


@pytest.mark.parametrize("kind, name", [(k, n) for k, names in NAMES.items() for n in names])
def test_a_kernel_is_known_by_its_name(kind: str, name: str):
    assert kind_of(name) == kind


def test_ranges_are_no_kernels():
    assert is_no_kernel("Optimizer.step#AdamW.step", annotated=False)
    assert is_no_kernel("Torch-Compiled Region: 0/0", annotated=False)
    assert is_no_kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", annotated=False)
    assert is_no_kernel("mine", annotated=True)
    assert not is_no_kernel("nvjet_hsh_128x256", annotated=False)


def test_time_is_counted_once_and_gaps_are_between_kernels():
    kernels = [
        Interval("nvjet_x", 100.0, 110.0),
        Interval("triton_b", 120.0, 140.0),  # the second half beside the next one
        Interval("kernel_cutlass_gemm", 130.0, 150.0),
        Interval("triton_a", 132.0, 134.0),  # hidden
        Interval("flash_fwd_kernel", 151.0, 156.0),
    ]
    found = of_kernels(reversed(kernels), steps=2)
    assert found.times == {
        OUR_GEMM: 5.0,
        LIBRARY_GEMM: 5.0,
        ATTENTION: 2.5,
        OPTIMIZER: 0.0,
        OTHER: 10.0,
        GAPS: 5.5,
    }
    assert found.whole * 2 == 156.0 - 100.0
    assert found.kernels[OTHER] == 1.0
    assert found.longest == {"triton_b": 10.0, "triton_a": 0.0}
    assert list(found.times) == list(SHARES)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_nothing_was_profiled():
    assert of_kernels([], steps=3).shares == {}
