//! A program with a whole archive in it, opened and verified by zcrecord.rs at run time.

mod host_counting;
mod model;
mod zcrecord;

fn main() {
    host_counting::count_from();
    let archive = zcrecord::Archive::open(model::MODEL_ARCHIVE).unwrap();
    archive.verify(&mut [0; 64]).unwrap();
    let mut weight = archive.get("encoder.weight").unwrap().bytes().unwrap();
    let copy;
    if option_env!("HOST_COPY").is_some() {
        copy = weight.to_vec(); // what the measurements have to notice
        weight = &copy;
    }
    let mut sum: f64 = weight.chunks_exact(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).sum();
    sum += archive.get("encoder.bias").unwrap().values::<i16>().unwrap().map(f64::from).sum::<f64>();
    host_counting::report(weight.as_ptr() as usize, weight.len(), sum);
}
